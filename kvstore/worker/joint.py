"""Writing one new token of each of many sequences at once: what a step that decodes does in every layer, without the native kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.geometry import UNIT_BYTES
from kvstore.worker.rows import ArenaRows, BlockTable, RowLayout


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
    arenas = {id(run.arena): run.arena for table, _ in places for run in table.runs}
    return next(iter(arenas.values())) if len(arenas) == 1 else None
