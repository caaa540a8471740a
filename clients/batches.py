"""Which columns of a left-padded batch can come from the store. Numbers only, no tensors.

A contiguous cache has one length for all rows: column j of every row is filled, or none is. A row's tokens start after its padding,
so the same column is another token of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidArgument


@dataclass(frozen=True)
class Row:
    """One prompt of a batch: so many columns of padding, then `tokens` [n]."""

    padding: int
    tokens: NDArray[np.int64]

    @property
    def columns(self) -> int:
        """Padding and tokens together."""
        return self.padding + len(self.tokens)


def rows_of(ids: NDArray[Any], mask: NDArray[Any] | None) -> list[Row]:
    """The prompts in `ids` [batch, columns], where `mask` [batch, columns] is 0 for padding; None: there is none.

    Raises InvalidArgument for padding anywhere but on the left, for a row without a token, and for shapes that do not fit.
    """
    if ids.ndim != 2 or ids.shape[0] == 0 or ids.dtype.kind not in "iu":
        raise InvalidArgument(f"token ids are {ids.dtype} of shape {ids.shape}; give integers, [batch, columns]")
    shown = np.ones(ids.shape, bool) if mask is None else np.asarray(mask) != 0
    if shown.shape != ids.shape:
        raise InvalidArgument(f"the attention mask has shape {shown.shape}, the token ids {ids.shape}; give one 0 or 1 a token")
    rows = []
    for row, (tokens, seen) in enumerate(zip(ids, shown, strict=True)):
        padding = len(seen) - int(seen.sum())
        if padding == len(seen):
            raise InvalidArgument(f"row {row} has no token; leave it out")
        if not seen[padding:].all():
            raise InvalidArgument(f"row {row} is padded on its right, or inside; pad on the left (padding_side='left')")
        rows.append(Row(padding, tokens[padding:].astype(np.int64)))
    return rows


def fillable_columns(rows: Sequence[Row], hits: Sequence[int]) -> int:
    """How many leading columns every row can fill, given the leading tokens of each that are at hand; 0 where no row gains by it."""
    columns = min(row.padding + hit for row, hit in zip(rows, hits, strict=True))
    return columns if columns > min(row.padding for row in rows) else 0
