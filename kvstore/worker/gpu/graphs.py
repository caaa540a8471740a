"""CUDA graphs for decode: a step of single new tokens is recorded once for its size, and replayed with other numbers.

A graph has the pool's address in it: it is replayed only while that very mapping is the store's, and all are recorded anew after the
worker has attached again. Sizes are rounded up (rows, and blocks of the longest), so that few graphs serve all steps; rows that fill
up have no tokens, and the kernels leave them out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvstore.errors import KVStoreError
from kvstore.kernels.layout import SlotSpace
from kvstore.worker.attention import Step
from kvstore.worker.gpu.device import Gpu, Graph
from kvstore.worker.gpu.kernels import GpuStep, Places, entries, packed
from kvstore.worker.joint import alike
from kvstore.worker.rows import ArenaRows, BlockTable, RowLayout, Scratch
from kvstore.worker.spans import Span

MOST_GRAPHS = 24  # kept at once: each holds the activations of its step
LEAST_BLOCKS = 32  # a table's width, in blocks, is this times a power of two

log = logging.getLogger(__name__)

Model = Callable[[Tensor, Tensor, Tensor, Step], Tensor]  # token ids [1, n], positions [1, n], rows to keep [n], step → logits [n, vocab]


@dataclass(frozen=True)
class Size:
    """What a graph was recorded for: so many rows, and so many blocks of each at most."""

    rows: int
    blocks: int


def size_for(rows: int, blocks: int) -> Size:
    """The smallest size that holds a step."""
    width = LEAST_BLOCKS
    while width < blocks:
        width *= 2
    return Size(1 << (rows - 1).bit_length(), width)


class DecodeGraphs:
    """The graphs of one model over one pool. `why_off`: what kept a step from being recorded; none is tried after that."""

    def __init__(self, gpu: Gpu, layout: RowLayout) -> None:
        self.why_off = ""
        self.recorded = self.replayed = 0
        self._gpu, self._layout = gpu, layout
        self._arena: ArenaRows | None = None
        self._graphs: OrderedDict[Size, _Recorded] = OrderedDict()  # the one used last is the last

    def run(self, model: Model, spans: Sequence[Span], tokens: Sequence[int], positions: Sequence[int], mapped: ArenaRows) -> Tensor | None:
        """Logits [row, vocab] of a step of single new tokens, on the device; None where no graph can do it. Raises MemoryLost.

        mapped   the store's arena as it is mapped now: blocks that lie elsewhere are left to who calls
        """
        arena = alike([(span.table, span.start) for span in spans])
        if self.why_off or arena is not mapped or not all(span.is_row for span in spans):
            return None
        self._gpu.views.require(mapped.memory)
        if arena is not self._arena:
            self.drop()
            self._arena = arena
        size = size_for(len(spans), max(span.start // self._layout.tokens + 1 for span in spans))
        found = self._graphs.get(size)
        try:
            if found is None:
                found = self._record(model, size, arena, spans, tokens, positions)
            else:
                found.fill(spans, tokens, positions)
            found.graph.replay()
        except (RuntimeError, KVStoreError) as error:  # torch raises RuntimeError for what cannot be recorded
            self.drop()
            self.why_off = f"{type(error).__name__}: {error}"
            log.warning("decode steps are not recorded as CUDA graphs any more: %s", self.why_off)
            return None
        self._graphs.move_to_end(size)
        self.replayed += 1
        return found.logits[: len(spans)]

    def drop(self) -> None:
        """Let all graphs go: before the memory that they were recorded with does."""
        for recorded in self._graphs.values():
            recorded.graph.close()
        self._graphs.clear()
        self._arena = None

    def _record(
        self, model: Model, size: Size, arena: ArenaRows, spans: Sequence[Span], tokens: Sequence[int], positions: Sequence[int]
    ) -> _Recorded:
        if len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)[1].graph.close()
        inputs = _Inputs(self._gpu, self._layout, size, arena)
        inputs.fill(spans, tokens, positions)
        graph, logits = self._gpu.capture(lambda: inputs.run(model))
        made = self._graphs[size] = _Recorded(graph, logits, inputs.fill)
        self.recorded += 1
        return made


@dataclass(frozen=True)
class _Recorded:
    graph: Graph
    logits: Tensor
    fill: Callable[[Sequence[Span], Sequence[int], Sequence[int]], None]


class _Inputs:
    """What differs from one replay to the next, in tensors that stay where they are."""

    def __init__(self, gpu: Gpu, layout: RowLayout, size: Size, arena: ArenaRows) -> None:
        self._gpu, self._layout, self._size, self._arena = gpu, layout, size, arena
        rows = size.rows
        self._ids = torch.zeros((2, 1, rows), dtype=torch.int64, device=gpu.device)  # tokens, then their positions
        self._keep = torch.arange(rows, device=gpu.device)
        self._numbers = torch.zeros(rows * size.blocks + 2 * rows + 1, dtype=torch.int32, device=gpu.device)
        slots = SlotSpace(layout.geometry, (arena.address,))
        self._places = Places.of(slots, self._numbers, rows, size.blocks * layout.tokens)
        self._scratch = Scratch(layout)

    def fill(self, spans: Sequence[Span], tokens: Sequence[int], positions: Sequence[int]) -> None:
        """The next step's numbers."""
        rows, more = self._size.rows, self._size.rows - len(spans)
        table = np.zeros((rows, self._size.blocks), np.uint32)
        for row, span in zip(table, spans, strict=False):
            blocks = span.start // self._layout.tokens + 1
            row[:blocks] = entries(span.table, [self._arena])[:blocks]
        context = [span.total for span in spans] + [0] * more
        self._numbers.copy_(self._gpu.upload(packed(table, context, [1] * rows)))
        ids = np.array([[[*tokens, *[0] * more]], [[*positions, *[0] * more]]], np.int64)
        self._ids.copy_(self._gpu.upload(ids))

    def run(self, model: Model) -> Tensor:
        """The pass that is recorded."""
        spans = [Span(BlockTable(self._layout), 0, 1, row) for row in range(self._size.rows)]
        step = Step(spans, self._scratch, made=GpuStep(self._gpu, self._places, self._places, spans))
        return model(self._ids[0], self._ids[1], self._keep, step)
