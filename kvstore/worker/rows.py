"""A block's bytes as rows of tensors: how K and V are found in an arena, gathered and written. All paged addressing is here.

The arena is seen as a matrix whose rows are as long as every part of a block allows: the greatest common divisor of 4 KiB (where
slots start) and of one head's keys and values (which lie together in kv1). A gather of any blocks of any layer is then one
`index_select` of whole rows, at the speed of memory. Not thread-safe; a write and a gather are ordered by their caller.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore.errors import GeometryError
from kvstore.geometry import UNIT_BYTES, Geometry

CPU = torch.device("cpu")
_FIRST_BLOCKS = 64  # a table's room at first: 1,024 tokens in blocks of 16
FEW_BLOCKS = 4  # fewer whole blocks are written one by one: an indexed write wakes torch's threads, which costs more


Memory = NDArray[np.uint8] | Tensor  # a mapped arena as bytes: the host's, or a GPU's as torch sees it


class RowLayout:
    """Where the keys and values of one layer lie, counted in rows. Raises GeometryError for layouts other than kv1 without scales.

    Blocks of latent attention (MLA) are read as one head whose keys are latent ‖ rope, and whose values have no elements.
    `device` is where the blocks lie, and what is worked out about them.
    """

    def __init__(self, geometry: Geometry, device: torch.device = CPU) -> None:
        if geometry.format != "kv1" or geometry.quant is not None:
            raise GeometryError("the worker reads kv1 blocks without scales; choose such a geometry")
        self.geometry, self.device = geometry, device
        self.dtype = cast(torch.dtype, getattr(torch, geometry.dtype))
        self.tokens = geometry.block_tokens
        is_latent = geometry.kind == "mla"
        self.heads = 1 if is_latent else geometry.kv_heads
        self.key_dim = geometry.latent_dim + geometry.rope_dim if is_latent else geometry.key_dim
        self.value_dim = geometry.value_dim
        key_bytes = self.tokens * self.key_dim * self.dtype.itemsize
        value_bytes = self.tokens * self.value_dim * self.dtype.itemsize
        row_bytes = math.gcd(UNIT_BYTES, key_bytes, value_bytes)
        self.row_items = row_bytes // self.dtype.itemsize
        # One token's keys, or values, of one head are a whole number of pieces this long; slots and layers start at a multiple.
        self.piece_items = math.gcd(UNIT_BYTES // self.dtype.itemsize, self.key_dim, self.value_dim)
        self.unit_rows = UNIT_BYTES // row_bytes
        self._key_rows, self._value_rows = key_bytes // row_bytes, value_bytes // row_bytes
        self.layer_rows = self.heads * (self._key_rows + self._value_rows)
        heads = torch.arange(self.heads, device=device)[:, None]
        # Of each head's keys, of each head's values: the rows from a layer's start, [head, rows].
        self.key_at = heads * self._key_rows + torch.arange(self._key_rows, device=device)
        value_rows = torch.arange(self._value_rows, device=device)
        self.value_at = self.heads * self._key_rows + heads * self._value_rows + value_rows

    def check(self, keys: Tensor, values: Tensor) -> None:
        """Raise GeometryError unless keys and values are [head, token, dim] with this layout's heads and dimensions."""
        for part, dim in ((keys, self.key_dim), (values, self.value_dim)):
            if part.shape[0] != self.heads or part.shape[2] != dim:
                raise GeometryError(
                    f"keys {tuple(keys.shape)} and values {tuple(values.shape)} do not fit blocks of {self.heads} heads with "
                    f"{self.key_dim} and {self.value_dim} numbers; open the store with the model's own geometry"
                )

    def key_rows(self, starts: Tensor) -> Tensor:
        """[head × block × rows of a head's keys] in layer 0, for the first rows `starts` [block] of slots."""
        return (self.key_at[:, None, :] + starts[None, :, None]).flatten()

    def value_rows(self, starts: Tensor) -> Tensor:
        """As `key_rows`, for the values."""
        return (self.value_at[:, None, :] + starts[None, :, None]).flatten()

    def split(self, rows: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Gathered rows as keys [head, token, key_dim] and values [head, token, value_dim]; both are views."""
        middle = blocks * self.heads * self._key_rows
        keys = rows[:middle].view(self.heads, blocks * self.tokens, self.key_dim)
        return keys, rows[middle:].view(self.heads, blocks * self.tokens, self.value_dim)


class ArenaRows:
    """One mapped arena seen through a layout. Keeps the mapping alive; `address` tells two mappings apart."""

    def __init__(self, layout: RowLayout, arena: Memory) -> None:
        whole = len(arena) // UNIT_BYTES * UNIT_BYTES
        self.layout, self.memory = layout, arena
        memory = arena if isinstance(arena, Tensor) else torch.from_numpy(arena)
        self.address = memory.data_ptr()
        self.items = memory[:whole].view(layout.dtype)
        self.rows = self.items.view(-1, layout.row_items)
        self.pieces = self.items.view(-1, layout.piece_items)

    def is_of(self, arena: Memory) -> bool:
        """Whether this is how that arena is mapped now. A GPU's memory may be mapped anew where it was."""
        if isinstance(arena, Tensor):
            return arena is self.memory
        return arena.ctypes.data == self.address

    def starts(self, units: Sequence[int]) -> Tensor:
        """First rows [block] of the slots at `units`."""
        return torch.tensor(units, dtype=torch.int64, device=self.layout.device) * self.layout.unit_rows

    def write_part(self, unit: int, layer: int, first: int, keys: Tensor, values: Tensor) -> None:
        """Write tokens [first, first + n) of one block: keys [head, n, key_dim], values [head, n, value_dim]."""
        layout = self.layout
        at = (unit * layout.unit_rows + layer * layout.layer_rows) * layout.row_items
        for part, dim in ((keys, layout.key_dim), (values, layout.value_dim)):
            room = layout.tokens * dim
            self.items.as_strided(part.shape, (room, dim, 1), at + first * dim).copy_(part)
            at += layout.heads * room

    def copy_block(self, unit: int, source: "ArenaRows", source_unit: int) -> None:
        """Make the block at `unit` equal to another one."""
        rows = self.layout.geometry.slot_units * self.layout.unit_rows
        to, at = unit * self.layout.unit_rows, source_unit * self.layout.unit_rows
        self.rows[to : to + rows] = source.rows[at : at + rows]

    def write_whole(self, units: Sequence[int], layer: int, keys: Tensor, values: Tensor) -> None:
        """Write whole blocks: keys [head, blocks × tokens, key_dim], values likewise."""
        layout = self.layout
        starts = self.starts(units) + layer * layout.layer_rows
        for at, part in ((layout.key_rows(starts), keys), (layout.value_rows(starts), values)):
            if len(at):
                self.rows[at] = part.contiguous().view(-1, layout.row_items)


@dataclass
class Run:
    """Consecutive blocks of a sequence that lie in one arena."""

    arena: ArenaRows
    units: list[int] = field(default_factory=list)


class BlockTable:
    """Where the blocks of one sequence lie, in order. Nearly always one run; a second one once an arena has been lost."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.runs: list[Run] = []
        self._blocks = 0
        self._slots = np.empty(_FIRST_BLOCKS, np.uint64)

    def __len__(self) -> int:
        return self._blocks

    @property
    def slots(self) -> NDArray[np.uint64]:
        """[block] the address in this process of each block's slot. Later appends may leave it stale."""
        return self._slots[: self._blocks]

    def append(self, arena: ArenaRows, units: Sequence[int]) -> None:
        """Add blocks at the end."""
        if not self.runs or self.runs[-1].arena is not arena:
            self.runs.append(Run(arena))
        self.runs[-1].units.extend(units)
        blocks = self._blocks + len(units)
        if blocks > len(self._slots):
            self._slots = np.concatenate((self.slots, np.empty(2 * blocks, np.uint64)))
        self._slots[self._blocks : blocks] = np.array(units, np.uint64) * np.uint64(UNIT_BYTES) + np.uint64(arena.address)
        self._blocks = blocks

    def addresses(self) -> list[tuple[int, int]]:
        """Every block as (its arena's address, its unit), in order."""
        return [(run.arena.address, unit) for run in self.runs for unit in run.units]

    def pop(self) -> None:
        """Take the last block away."""
        self.runs[-1].units.pop()
        if not self.runs[-1].units:
            self.runs.pop()
        self._blocks -= 1

    def drop(self, first: int, count: int) -> None:
        """Take blocks [first, first + count) away; those after them move up."""
        kept = [*self.between(0, first), *self.between(first + count, self._blocks)]
        self.runs, self._blocks = [], 0
        for _, arena, units in kept:
            self.append(arena, units)

    def copy(self) -> "BlockTable":
        """A table of the same blocks, to go on differently."""
        made = BlockTable(self.layout)
        made.runs = [Run(run.arena, list(run.units)) for run in self.runs]
        made._blocks, made._slots = self._blocks, self._slots.copy()
        return made

    def between(self, first: int, last: int) -> Iterator[tuple[int, ArenaRows, list[int]]]:
        """Blocks [first, last), as (index of the first, arena, units) per run."""
        start = 0
        for run in self.runs:
            low, high = max(first, start), min(last, start + len(run.units))
            if low < high:
                yield low, run.arena, run.units[low - start : high - start]
            start += len(run.units)

    def write(self, layer: int, position: int, keys: Tensor, values: Tensor) -> None:
        """Write the K and V of consecutive tokens, the first at `position`: keys [head, token, key_dim], values likewise.

        Raises GeometryError where heads or dimensions are not the layout's.
        """
        size, total = self.layout.tokens, keys.shape[1]
        self.layout.check(keys, values)
        done = 0
        while done < total:
            block, inside = divmod(position + done, size)
            whole = 0 if inside else (total - done) // size
            _, arena, units = next(self.between(block, block + max(whole, 1)))
            if whole >= FEW_BLOCKS:
                count = len(units) * size
                arena.write_whole(units, layer, keys[:, done : done + count], values[:, done : done + count])
            else:
                count = min(size - inside, total - done)
                arena.write_part(units[0], layer, inside, keys[:, done : done + count], values[:, done : done + count])
            done += count


class Scratch:
    """Where one layer of one sequence is gathered. It grows to the longest context seen and is used again for every layer."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self._rows = torch.empty((0, layout.row_items), dtype=layout.dtype, device=layout.device)

    def take(self, blocks: int) -> Tensor:
        """Rows for `blocks` blocks of one layer; the next `take` may hand out the same ones."""
        needed = blocks * self.layout.layer_rows
        if needed > len(self._rows):
            shape = (needed + needed // 4, self.layout.row_items)
            self._rows = torch.empty(shape, dtype=self.layout.dtype, device=self.layout.device)
        return self._rows[:needed]


class Gatherer:
    """The reading of blocks [first, last) of a table, layer by layer: their rows are found once, then shifted by the layer."""

    def __init__(self, table: BlockTable, first: int, last: int) -> None:
        self.layout, self.first, self.blocks = table.layout, first, last - first
        self._parts: list[tuple[int, int, ArenaRows, Tensor]] = []
        for at, arena, units in table.between(first, last):
            starts = arena.starts(units)
            index = torch.cat((self.layout.key_rows(starts), self.layout.value_rows(starts)))
            self._parts.append((at - first, len(units), arena, index))

    def layer(self, layer: int, scratch: Scratch) -> tuple[Tensor, Tensor]:
        """Keys [head, token, key_dim] and values [head, token, value_dim] of these blocks, in scratch."""
        out = scratch.take(self.blocks)
        shift = layer * self.layout.layer_rows
        keys, values = self.layout.split(out, self.blocks)
        if len(self._parts) == 1:
            _, _, arena, index = self._parts[0]
            torch.index_select(arena.rows, 0, index + shift, out=out)
            return keys, values
        for first, count, arena, index in self._parts:
            part = self.layout.split(arena.rows.index_select(0, index + shift), count)
            tokens = slice(first * self.layout.tokens, (first + count) * self.layout.tokens)
            keys[:, tokens], values[:, tokens] = part
        return keys, values
