"""The engine's KV tensors as blocks of opaque bytes, and the copies between them and slots of the store. Host memory.

A block's bytes are those of its page in every layer, layer after layer, each in the order in which the page lies in memory. Pages may
lie at any stride (padding, packed layouts); layers at equal distances in one allocation are copied as one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.clients.arena import Bytes
from kvstore.errors import GeometryError

NOT_HOST = "KV tensors are on {device}; the connector copies host memory only: run vLLM's CPU backend, or leave the connector out"


@dataclass(frozen=True)
class Run:
    """Layers whose pages have one size and lie at one distance: `bytes` [layers, blocks, page bytes], over the engine's own memory."""

    bytes: NDArray[np.uint8]

    @property
    def page_bytes(self) -> int:
        """Of all its layers, for one block."""
        return int(self.bytes.shape[0] * self.bytes.shape[2])


class Pages:
    """The KV of one worker. Any thread may copy; whoever calls sees to it that a block is not computed on meanwhile."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors   per layer [blocks, ...], the block first, as vLLM registers them; a layer that shares another's memory counts once.

        Raises GeometryError for tensors that are not in host memory, or whose pages have gaps inside.
        """
        self._tensors: tuple[Any, ...] = tuple(tensors.values())  # the memory lives as long as this object
        if states := [type(each).__name__ for each in self._tensors if not isinstance(each, torch.Tensor)]:
            raise GeometryError(f"the engine registered a {states[0]} for a layer: a state, not keys and values; not shared yet")
        distinct = {(each.data_ptr(), tuple(each.shape), each.stride()): each for each in tensors.values()}
        if not distinct:
            raise GeometryError("the engine registered no KV tensors; the model has no attention layers to share")
        layers = [_page_rows(each) for each in distinct.values()]
        if len({each.shape[0] for each in layers}) > 1:
            raise GeometryError("the engine's layers have different numbers of blocks; one block id must name a block in each")
        self.layers = len(layers)
        self.blocks = int(layers[0].shape[0])
        self.layout = _layout(list(distinct.values()))
        self._runs = [Run(each) for each in _joined(layers)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(run.page_bytes for run in self._runs)

    def gather(self, block: int, slot: Bytes) -> None:
        """Copy an engine block into a slot's first `block_bytes`."""
        for run, part in self._parts(slot):
            np.copyto(part, run.bytes[:, block])

    def scatter(self, block: int, slot: Bytes) -> None:
        """Copy a slot's first `block_bytes` into an engine block."""
        for run, part in self._parts(slot):
            np.copyto(run.bytes[:, block], part)

    def _parts(self, slot: Bytes) -> list[tuple[Run, NDArray[np.uint8]]]:
        parts, start = [], 0
        for run in self._runs:
            end = start + run.page_bytes
            parts.append((run, slot[start:end].reshape(run.bytes.shape[0], run.bytes.shape[2])))
            start = end
        return parts


def _page_rows(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A layer's tensor as [blocks, page bytes] over the same memory."""
    if tensor.device.type != "cpu":
        raise GeometryError(NOT_HOST.format(device=tensor.device))
    page = tensor.permute(0, *_memory_order(tensor))
    if not page[:1].is_contiguous():
        shape, strides = tuple(tensor.shape[1:]), tensor.stride()[1:]
        raise GeometryError(f"pages of shape {shape} with strides {strides} have gaps; this layout is not shared")
    width = tensor.element_size()
    items = page[0].numel()
    flat = torch.as_strided(tensor, (tensor.shape[0], items), (tensor.stride(0), 1), tensor.storage_offset())
    rows = flat.view(torch.uint8).numpy()
    if rows.shape[1] != items * width:
        raise GeometryError(f"a page of {items} items of {width} bytes came out as {rows.shape[1]} bytes")
    return rows


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
