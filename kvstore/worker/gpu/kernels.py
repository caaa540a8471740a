"""The CUDA kernels under a step: all new K and V are written in one launch a layer, all single new tokens attend in another."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore.errors import GeometryError, InvalidArgument
from kvstore.geometry import UNIT_BYTES, Geometry
from kvstore.kernels.arrays import Array, describe
from kvstore.kernels.decode import Attention, paged_decode
from kvstore.kernels.layout import ARENAS, SlotSpace, table_entries
from kvstore.kernels.variants import ELEMENTS, HEAD_DIMS, Variant, copy_variant, decode_variant, reduce_variant, write_variant
from kvstore.kernels.writing import write_kv
from kvstore.worker.gpu.device import Gpu
from kvstore.worker.native import KernelStep, Part
from kvstore.worker.rows import ArenaRows, BlockTable, RowLayout

WIDEST_BYTES = 16  # bytes that a thread copies at once where all rows are multiples of it, as those of all served heads are


def variants_for(geometry: Geometry, q_heads: int) -> list[Variant]:
    """The kernels that a model needs. Raises GeometryError where there are none for it."""
    dtype, dim = geometry.dtype, geometry.key_dim
    if geometry.kind != "mha" or dim != geometry.value_dim or geometry.quant is not None or geometry.format != "kv1":
        raise GeometryError(
            "the CUDA kernels read keys and values per head, of one size and without scales; serve this model with --device cpu"
        )
    if dtype not in ELEMENTS or dim not in HEAD_DIMS:
        raise GeometryError(f"no decode kernel for {dtype} and heads of {dim}; serve this model with --device cpu")
    return [
        decode_variant(dtype, dim, q_heads // geometry.kv_heads),
        reduce_variant(dtype, dim),
        write_variant(WIDEST_BYTES),
        copy_variant(WIDEST_BYTES),
    ]


@dataclass(frozen=True)
class Places:
    """Where sequences lie, on the device: a row each of block-table entries, tokens with the new ones, and where the new ones begin."""

    slots: SlotSpace
    table: Array  # [sequence, block] uint32
    context: Array  # [sequence] int32
    starts: Array  # [sequence + 1] int32
    most_tokens: int  # at least the longest context

    @classmethod
    def of(cls, slots: SlotSpace, numbers: Tensor, sequences: int, most_tokens: int) -> Places:
        """From `packed` numbers."""
        width = (len(numbers) - 2 * sequences - 1) // sequences
        table, rest = numbers[: sequences * width], numbers[sequences * width :]
        context, starts = rest[:sequences], rest[sequences:]
        return cls(slots, describe(table.view(sequences, width), "uint32"), describe(context), describe(starts), most_tokens)


def packed(table: NDArray[np.uint32], context: Sequence[int], counts: Sequence[int]) -> NDArray[np.int32]:
    """All numbers of `Places` in one array, for one copy: the table, the contexts, the starts."""
    return np.concatenate((table.view(np.int32).ravel(), np.array(context, np.int32), np.cumsum([0, *counts], dtype=np.int32)))


class GpuKernels:
    """`Kernels` for blocks of one layout on one GPU."""

    def __init__(self, gpu: Gpu, layout: RowLayout) -> None:
        self.gpu, self.layout = gpu, layout

    def step(self, q_heads: int, parts: Sequence[Part], rows: Sequence[Part]) -> KernelStep:
        """See `Kernels`. Blocks in more arenas than a table can name are left to torch. Raises MemoryLost."""
        arenas = {id(run.arena): run.arena for part in parts for run in part.table.runs if run.units}
        for arena in arenas.values():
            self.gpu.views.require(arena.memory)
        if len(arenas) > ARENAS:
            return ByTorch(parts)
        every = self._places(list(arenas.values()), parts)
        chosen = every if len(rows) == len(parts) else self._places(list(arenas.values()), rows) if rows else None
        return GpuStep(self.gpu, every, chosen, rows)

    def _places(self, arenas: Sequence[ArenaRows], parts: Sequence[Part]) -> Places:
        context = [part.start + part.count for part in parts]
        blocks = [-(-tokens // self.layout.tokens) for tokens in context]
        table = np.zeros((len(parts), max(blocks)), np.uint32)
        for row, part, some in zip(table, parts, blocks, strict=True):
            row[:some] = entries(part.table, arenas)[:some]
        numbers = self.gpu.upload(packed(table, context, [part.count for part in parts]))
        slots = SlotSpace(self.layout.geometry, tuple(arena.address for arena in arenas))
        return Places.of(slots, numbers, len(parts), max(context))


def entries(table: BlockTable, arenas: Sequence[ArenaRows]) -> NDArray[np.uint32]:
    """[block] a sequence's block table as the kernels read it, with the arenas numbered as given."""
    numbers = {id(arena): number for number, arena in enumerate(arenas)}
    found, at = np.empty(len(table), np.uint32), 0
    for run in (run for run in table.runs if run.units):
        slots = table.slots[at : at + len(run.units)] - np.uint64(run.arena.address)
        found[at : at + len(slots)] = table_entries((slots // np.uint64(UNIT_BYTES)).astype(np.int64), numbers[id(run.arena)])
        at += len(slots)
    return found


class GpuStep:
    """`KernelStep`: `every` part of the step, and those of its `rows`."""

    def __init__(self, gpu: Gpu, every: Places, chosen: Places | None, rows: Sequence[Part]) -> None:
        self.rows = rows
        self._gpu, self._every, self._chosen = gpu, every, chosen
        self._whole = chosen is every

    @functools.cached_property
    def at(self) -> Tensor:
        """[row] where the rows are in the step."""
        return self._gpu.upload(np.array([row.at for row in self.rows], np.int64))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KernelStep`: keys [1, kv_heads, token, dim], values likewise."""
        to = self._every
        write_kv(self._gpu.backend, _rows(keys[0]), _rows(values[0]), to.slots, to.table, to.starts, to.context, layer=layer)

    def queries(self, query: Tensor) -> Tensor:
        """See `KernelStep`: of [q_heads, token, dim]."""
        return query if self._whole else query.index_select(1, self.at)

    def decode(self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """See `KernelStep`: query [q_heads, row, dim]. Returns [row, q_heads, dim]. Raises InvalidArgument for capped scores."""
        if softcap is not None:
            raise InvalidArgument("the CUDA kernels cap no scores; serve this model with --device cpu")
        at = self._chosen
        if at is None:
            raise InvalidArgument("no row of this step attends by itself")
        rows = _rows(query)
        out = torch.empty((rows.shape[0], rows.shape[1], rows.shape[2]), dtype=rows.dtype, device=rows.device)
        paged_decode(
            self._gpu.backend, rows, out, at.slots, at.table, at.context, layer=layer, max_context=at.most_tokens,
            attention=Attention(scale, window or 0), sink_logits=None if sinks is None else sinks.float().contiguous(),
        )  # fmt: skip
        return out

    def attend(
        self, layer: int, part: Part, query: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor | None:
        """See `KernelStep`: torch does it, which is at its best here."""
        return None


class ByTorch:
    """`KernelStep` where the kernels cannot be used: torch writes part by part, and attends for all."""

    rows: Sequence[Part] = ()
    at = torch.zeros(0, dtype=torch.int64)

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """See `KernelStep`."""
        for part in self._parts:
            tokens = slice(part.at, part.at + part.count)
            part.table.write(layer, part.start, keys[0][:, tokens], values[0][:, tokens])

    def queries(self, query: Tensor) -> Tensor:
        """See `KernelStep`: there are none."""
        return query[:, :0]

    def decode(self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """See `KernelStep`: never called, since there are no rows."""
        raise InvalidArgument("no row of this step attends through a kernel")

    def attend(
        self, layer: int, part: Part, query: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor | None:
        """See `KernelStep`: torch does it, which is at its best here."""
        return None


def _rows(heads: Tensor) -> Tensor:
    """[token, head, dim] of [head, token, dim], a token's numbers together."""
    rows = heads.transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
