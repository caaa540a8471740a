"""The engine's KV tensors as blocks of opaque bytes, and the copies between them and slots of the store: here in host memory.

A block's bytes are those of its page in every layer, layer after layer, each in the order in which the page lies in memory. Pages may
lie at any stride (padding, packed layouts); layers at equal distances in one allocation are copied as one. For a GPU's memory see
vllm_device.py.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.clients.arena import Arena, Bytes
from kvstore.errors import GeometryError

NOT_HOST = "KV tensors are on {device}; what copies them is for host memory: run vLLM's CPU backend, or leave the connector out"


class EnginePages(Protocol):
    """The KV of one worker, of one KV cache group. Whoever copies sees to it that a block is not computed on meanwhile."""

    layers: int
    blocks: int
    layout: str  # names how a block's bytes are made up
    copies_at_once: int  # blocks that are best given to one call

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""

    def source(self, arena: Arena, unit: int) -> Bytes:
        """The bytes of the slot at `unit`, to be read by `scatter`."""

    def write_to(self, arena: Arena) -> None:
        """Slots of this arena will be gathered into."""

    def gather(self, blocks: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy engine blocks, each into a slot's first `block_bytes`. When it returns the copies are complete."""

    def scatter(self, blocks: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the first `block_bytes` of slots, each into an engine block. When it returns the copies are complete."""

    def close(self) -> None:
        """No copy follows."""


@dataclass(frozen=True)
class Rows:
    """Where a layer's pages lie: the first at `address`, one every `stride_bytes`."""

    address: int
    blocks: int
    stride_bytes: int
    page_bytes: int


@dataclass(frozen=True)
class Layers:
    """An engine's layers, those that share memory once; `rows` of each."""

    rows: tuple[Rows, ...]
    layout: str
    tensors: tuple[torch.Tensor, ...]  # the memory lives as long as this object

    @classmethod
    def of(cls, tensors: Mapping[str, object]) -> Layers:
        """tensors   per layer [blocks, ...], the block first, as vLLM registers them; a layer that shares another's memory counts once.

        Raises GeometryError for what are no such tensors, or whose pages have gaps inside.
        """
        whole = tuple(each for each in tensors.values() if isinstance(each, torch.Tensor))
        if states := [type(each).__name__ for each in tensors.values() if not isinstance(each, torch.Tensor)]:
            raise GeometryError(f"the engine registered a {states[0]} for a layer: a state, not keys and values; not shared yet")
        distinct = {(each.data_ptr(), tuple(each.shape), each.stride()): each for each in whole}
        if not distinct:
            raise GeometryError("the engine registered no KV tensors; the model has no attention layers to share")
        rows = tuple(_rows(each) for each in distinct.values())
        if len({each.blocks for each in rows}) > 1:
            raise GeometryError("the engine's layers have different numbers of blocks; one block id must name a block in each")
        return cls(rows, _layout(list(distinct.values())), whole)


@dataclass(frozen=True)
class Run:
    """Layers whose pages have one size and lie at one distance: `bytes` [layers, blocks, page bytes], over the engine's own memory."""

    bytes: NDArray[np.uint8]

    @property
    def page_bytes(self) -> int:
        """Of all its layers, for one block."""
        return int(self.bytes.shape[0] * self.bytes.shape[2])


class Pages:
    """See `EnginePages`. In host memory."""

    copies_at_once = 1

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors   see `Layers.of`. Raises GeometryError for those that cannot be taken, or are not in host memory."""
        self._layers = Layers.of(tensors)
        if (device := self._layers.tensors[0].device).type != "cpu":
            raise GeometryError(NOT_HOST.format(device=device))
        self.layers, self.layout = len(self._layers.rows), self._layers.layout
        self.blocks = self._layers.rows[0].blocks
        self._runs = [Run(each) for each in _joined([_bytes(rows) for rows in self._layers.rows])]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(run.page_bytes for run in self._runs)

    def source(self, arena: Arena, unit: int) -> Bytes:
        """The bytes of the slot at `unit`."""
        return arena.view(unit, self.block_bytes)

    def write_to(self, arena: Arena) -> None:
        """Nothing to prepare."""

    def gather(self, blocks: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy engine blocks, each into a slot's first `block_bytes`."""
        for block, slot in zip(blocks, slots, strict=True):
            for run, part in self._parts(slot):
                np.copyto(part, run.bytes[:, block])

    def scatter(self, blocks: Sequence[int], slots: Sequence[Bytes]) -> None:
        """Copy the first `block_bytes` of slots, each into an engine block."""
        for block, slot in zip(blocks, slots, strict=True):
            for run, part in self._parts(slot):
                np.copyto(run.bytes[:, block], part)

    def close(self) -> None:
        """Nothing to give back."""

    def _parts(self, slot: Bytes) -> list[tuple[Run, NDArray[np.uint8]]]:
        parts, start = [], 0
        for run in self._runs:
            end = start + run.page_bytes
            parts.append((run, slot[start:end].reshape(run.bytes.shape[0], run.bytes.shape[2])))
            start = end
        return parts


def _rows(tensor: torch.Tensor) -> Rows:
    """Where a layer's pages lie."""
    order = _memory_order(tensor)
    page = tensor.permute(0, *order)
    if not page[:1].is_contiguous():
        shape, strides = tuple(tensor.shape[1:]), tensor.stride()[1:]
        raise GeometryError(f"pages of shape {shape} with strides {strides} have gaps; this layout is not shared")
    width = tensor.element_size()
    return Rows(tensor.data_ptr(), int(tensor.shape[0]), tensor.stride(0) * width, page[0].numel() * width)


def _bytes(rows: Rows) -> NDArray[np.uint8]:
    """Pages in this process's memory as [blocks, page bytes]."""
    whole = (ctypes.c_uint8 * (rows.stride_bytes * (rows.blocks - 1) + rows.page_bytes)).from_address(rows.address)
    shape, strides = (rows.blocks, rows.page_bytes), (rows.stride_bytes, 1)
    return np.lib.stride_tricks.as_strided(np.ctypeslib.as_array(whole), shape, strides)


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of a page, from the one with the widest steps in memory to the one with the narrowest."""
    strides = tensor.stride()
    return sorted(range(1, tensor.dim()), key=lambda dim: (-strides[dim], dim))


def _joined(layers: list[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """Neighbours of one shape at one distance from each other as one array [layers, blocks, page bytes]."""
    groups: list[list[NDArray[np.uint8]]] = []
    for layer in layers:
        last = groups[-1] if groups else None
        if last and last[0].shape == layer.shape and last[0].strides == layer.strides and _distance(last[-1], layer) > 0:
            step = _distance(last[0], last[1]) if len(last) > 1 else _distance(last[-1], layer)
            if _distance(last[-1], layer) == step:
                last.append(layer)
                continue
        groups.append([layer])
    return [_stacked(group) for group in groups]


def _distance(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    return int(other.ctypes.data - one.ctypes.data)


def _stacked(group: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    first = group[0]
    step = _distance(first, group[1]) if len(group) > 1 else 0
    return np.lib.stride_tricks.as_strided(first, (len(group), *first.shape), (step, *first.strides))


def _layout(tensors: list[torch.Tensor]) -> str:
    """Names how a block's bytes are made up: each layer's page shape, element type, and the order of its dimensions in memory."""
    facts = [f"{tensor.dtype}{list(tensor.shape[1:])}{_memory_order(tensor)}" for tensor in tensors]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
