"""The CPU kernels under a step: all single new tokens attend in one call a layer, over K and V where they lie; a prompt's in one call each
where the processor multiplies bfloat16; all new K and V are written in another. Their sums are in another order than torch's, so results
differ in the last bits."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvstore.geometry import Geometry
from kvstore.kernels.cpu import CpuAttention, Prompt, Strides, available
from kvstore.worker.rows import BlockTable, RowLayout


class Part(Protocol):
    """One sequence's part in a step: see `spans.Span`."""

    table: BlockTable
    start: int
    count: int
    at: int


class KernelStep(Protocol):
    """The kernels' part in one step: they write all its new K and V, and attend for its rows. Tensors as `NativeStep` has them."""

    @property
    def rows(self) -> Sequence[Part]:
        """Those that attend through the kernel."""

    @property
    def at(self) -> Tensor:
        """[row] where they are in the step."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put all new K and V of a layer into their slots."""

    def queries(self, query: Tensor) -> Tensor:
        """The rows' queries of a step's."""

    def decode(self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """Attention of the rows."""

    def attend(
        self, layer: int, part: Part, query: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor | None:
        """Attention of a part with several new tokens, or None where torch is to do it."""


class Kernels(Protocol):
    """Kernels that attend over block tables in place."""

    def step(self, q_heads: int, parts: Sequence[Part], rows: Sequence[Part]) -> KernelStep:
        """For one step with these parts, of which `rows` have a single new token each."""


class Native:
    """The kernels for the blocks of one layout. Made for a cache; each step uses it through a `NativeStep`."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._kernels: dict[int, CpuAttention] = {}

    def step(self, q_heads: int, parts: Sequence[Part], rows: Sequence[Part]) -> "NativeStep":
        """See `Kernels.step`."""
        return NativeStep(self.kernel(q_heads), parts, rows)

    def kernel(self, q_heads: int) -> CpuAttention:
        """The kernel for so many query heads, with as many threads as torch has."""
        found = self._kernels.get(q_heads)
        if found is None or found.threads != torch.get_num_threads():
            found = self._kernels[q_heads] = CpuAttention(self._geometry, q_heads, threads=torch.get_num_threads())
        return found


def native_for(layout: RowLayout) -> Native | None:
    """The kernels for a layout; None where there are none, and torch does it all."""
    if available() or layout.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    return Native(layout.geometry)


class NativeStep:
    """One step's calls: which slots its rows attend to, and where its new tokens go, is worked out once for all layers.

    parts   every part of the step, in its order    rows    those of a single new token that attend through the kernel
    at      [row] where the rows are in the step
    """

    def __init__(self, kernel: CpuAttention, parts: Sequence[Part], rows: Sequence[Part]) -> None:
        self.rows = rows
        self._kernel = kernel
        self._writing = kernel.writing(*_targets(parts), batch=1)
        self._prompts: dict[int, Prompt | None] = {}  # by where a part is in the step; None: not served
        self._reading = kernel.reading([row.table.slots for row in rows], [row.start + 1 for row in rows]) if rows else None
        places = [row.at for row in rows]
        self.at = torch.tensor(places)
        self._is_run = bool(places) and places == list(range(places[0], places[0] + len(places)))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put all new K and V of a layer into their slots: keys [1, kv_heads, token, dim], values likewise; or latents and rotary keys."""
        keys, values = _rows_together(keys), _rows_together(values)
        self._writing.write(layer, keys.data_ptr(), values.data_ptr(), _strides(keys), _strides(values))

    def decode(self, layer: int, query: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
        """Attention of the rows: query [q_heads, row, dim], from `queries`. Returns [row, q_heads, value dim]."""
        assert self._reading is not None
        query = _rows_together(query)
        rows, width = query.shape[1], query.element_size()
        out = query.new_empty((rows, query.shape[0], self._kernel.value_dim))
        logits = sinks.float().contiguous() if sinks is not None else None
        self._reading.decode(
            layer, query.data_ptr(), out.data_ptr(), scale=scale, window=window or 0, softcap=softcap or 0.0,
            sinks=logits.data_ptr() if logits is not None else 0, q_strides=(query.stride(1) * width, query.stride(0) * width),
        )  # fmt: skip
        return out

    def attend(
        self, layer: int, part: Part, query: Tensor, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None
    ) -> Tensor | None:
        """Attention of a part: query [q_heads, its new tokens, dim]. Returns [its new tokens, q_heads, value dim], or None: see Kernels."""
        if part.at not in self._prompts:
            self._prompts[part.at] = self._kernel.prompt(part.table.slots, part.start, part.count)
        prompt = self._prompts[part.at]
        if prompt is None:
            return None
        query = _rows_together(query)
        width = query.element_size()
        out = query.new_empty((query.shape[1], query.shape[0], self._kernel.value_dim))
        logits = sinks.float().contiguous() if sinks is not None else None
        done = prompt.attend(
            layer, query.data_ptr(), out.data_ptr(), scale=scale, window=window or 0, softcap=softcap or 0.0,
            sinks=logits.data_ptr() if logits is not None else 0, q_strides=(query.stride(1) * width, query.stride(0) * width),
            out_strides=(out.stride(0) * width, out.stride(1) * width),
        )  # fmt: skip
        if not done:
            self._prompts[part.at] = None
        return out if done else None

    def queries(self, query: Tensor) -> Tensor:
        """The rows' queries of a step's [q_heads, token, dim]: [q_heads, row, dim], without a copy where they are next to each other."""
        if self._is_run:
            return query[:, self.rows[0].at : self.rows[0].at + len(self.rows)]
        return query.index_select(1, self.at)


def _targets(parts: Sequence[Part]) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Slots and places of all new tokens."""
    slots, places = [], []
    for part in parts:
        positions = np.arange(part.start, part.start + part.count)
        blocks, inside = np.divmod(positions, part.table.layout.tokens)
        slots.append(part.table.slots[blocks])
        places.append(inside)
    return np.concatenate(slots), np.concatenate(places).astype(np.int32)


def _rows_together(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _strides(tensor: Tensor) -> Strides:
    width = tensor.element_size()
    return Strides(tensor.stride(0) * width, tensor.stride(1) * width, tensor.stride(2) * width)
