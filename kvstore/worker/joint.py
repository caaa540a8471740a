"""One new token of each of many sequences at once, by torch: what a step that decodes does in every layer without the native kernel.

Sequences whose context is short are gathered and attended to together; for long ones a call each costs little beside the work.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kvstore.geometry import UNIT_BYTES
from kvstore.worker.rows import ArenaRows, BlockTable, RowLayout

GROUP_BYTES = 1 << 20  # gathered at once for one layer of a group: stays in a core's cache


class Part(Protocol):
    """One sequence's part in a step: see `spans.Span`."""

    table: BlockTable
    start: int
    at: int


P = TypeVar("P", bound=Part)


class JointWriter:
    """The places of tokens in one arena, found once a step and shifted by the layer.

    Each is given as a table and a position in it; all of these blocks must lie in `arena`.
    """

    def __init__(self, layout: RowLayout, arena: ArenaRows, places: Sequence[tuple[BlockTable, int]]) -> None:
        self._layout, self._arena = layout, arena
        size, piece = layout.tokens, layout.piece_items
        units, inside = [], []
        for table, position in places:
            units.append((int(table.slots[position // size]) - arena.address) // UNIT_BYTES)
            inside.append(position % size)
        starts = torch.tensor(units) * (UNIT_BYTES // layout.dtype.itemsize)
        heads = torch.arange(layout.heads)[None, :]
        parts, at = [], 0
        for dim in (layout.key_dim, layout.value_dim):
            first = (starts + at + torch.tensor(inside) * dim)[:, None] + heads * (size * dim)  # [token, head], in items
            parts.append((first[..., None] // piece + torch.arange(dim // piece)).flatten(1))
            at += layout.heads * size * dim
        self._index = torch.cat(parts, dim=1).flatten()
        self._layer_pieces = at // piece

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer's K and V: keys [head, token, key_dim], values likewise, the tokens in the order of `places`."""
        self._layout.check(keys, values)
        tokens = keys.shape[1]
        rows = [part.transpose(0, 1).reshape(tokens, part.shape[0] * part.shape[2]) for part in (keys, values)]
        self._arena.pieces.index_copy_(
            0, self._index + layer * self._layer_pieces, torch.cat(rows, dim=1).view(-1, self._layout.piece_items)
        )


def alike(places: Sequence[tuple[BlockTable, int]]) -> ArenaRows | None:
    """The arena in which all these places are; None where they are in several."""
    arenas = {id(run.arena): run.arena for table, _ in places for run in table.runs if run.units}
    return next(iter(arenas.values())) if len(arenas) == 1 else None


class JointReader:
    """Attention of rows, each the one new token of a sequence that attends to the last `window` tokens, or to all.

    All their blocks lie in `arena`. Rows are filled up to the longest; what fills them is zero and masked.
    """

    def __init__(self, layout: RowLayout, arena: ArenaRows, rows: Sequence[Part], window: int | None) -> None:
        self.at = torch.tensor([row.at for row in rows])
        self._layout, self._arena, self._rows = layout, arena, len(rows)
        size = layout.tokens
        lows = [0 if window is None else max(0, row.start + 1 - window) for row in rows]
        blocks = [_blocks_from(low // size, row, size) for low, row in zip(lows, rows, strict=True)]
        self._tokens = max(len(some) for some in blocks) * size
        units = torch.tensor([some + some[-1:] * (self._tokens // size - len(some)) for some in blocks]) - arena.address // UNIT_BYTES
        starts = (units * layout.unit_rows)[:, None, :, None]
        self._key_index = (layout.key_at[:, None, :] + starts).flatten()
        self._value_index = (layout.value_at[:, None, :] + starts).flatten()
        first = torch.tensor([low % size for low in lows])[:, None]
        end = torch.tensor([row.start + 1 - low // size * size for low, row in zip(lows, rows, strict=True)])[:, None]
        places = torch.arange(self._tokens)
        self._mask = ((places >= first) & (places < end))[:, None, None]
        unused = (places >= end)[:, None].expand(-1, layout.heads, -1)
        self._unused = unused.reshape(-1).nonzero().flatten()

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Attention of a layer whose K and V are written: query [q_heads, row, dim]. Returns [row, q_heads, value dim]."""
        layout, shift = self._layout, layer * self._layout.layer_rows
        parts: list[Tensor] = []
        for index, dim in ((self._key_index, layout.key_dim), (self._value_index, layout.value_dim)):
            part = self._arena.rows.index_select(0, index + shift).view(-1, dim)
            parts.append(part.index_fill_(0, self._unused, 0).view(self._rows, layout.heads, self._tokens, dim))
        grouped = query.transpose(0, 1).reshape(self._rows, layout.heads, -1, layout.key_dim)
        out = torch.nn.functional.scaled_dot_product_attention(grouped, parts[0], parts[1], attn_mask=self._mask, scale=scaling)
        return out.reshape(self._rows, query.shape[0], layout.value_dim)


def groups_of(layout: RowLayout, rows: Sequence[P], window: int | None) -> list[list[P]]:
    """Rows to attend together: alike in length, and few enough for GROUP_BYTES. Those that go alone are in none."""
    block_bytes = layout.tokens * layout.heads * (layout.key_dim + layout.value_dim) * layout.dtype.itemsize

    def reach(row: P) -> int:
        return -(-min(row.start + 1, window or row.start + 1) // layout.tokens) + 1

    groups: list[list[P]] = []
    for row in sorted(rows, key=reach):
        blocks = reach(row)
        if not groups or blocks > 2 * reach(groups[-1][0]) or (len(groups[-1]) + 1) * blocks * block_bytes > GROUP_BYTES:
            groups.append([])
        groups[-1].append(row)
    return [group for group in groups if len(group) > 1]


def _blocks_from(first: int, row: Part, size: int) -> list[int]:
    """Of the blocks that a row attends to, from `first` on: where they are, in units from address 0."""
    slots: list[int] = row.table.slots[first : row.start // size + 1].tolist()
    return [slot // UNIT_BYTES for slot in slots]
