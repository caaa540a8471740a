"""Slots and blocks far into their memory: offsets that do not fit 32 bits. The memory is reserved, and only what is used is taken."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.geometry import UNIT_BYTES, Geometry
from kvstore.kernels.backend import Backend
from kvstore.kernels.copying import copy_blocks, engine_tensors
from kvstore.kernels.decode import paged_decode
from kvstore.kernels.layout import SlotSpace, table_entries
from kvstore.kernels.writing import write_kv

FAR_BYTES = 9 << 30  # past 2, 4 and 8 GiB, where offsets that are cut, or signed, come out elsewhere
NO_RESERVE = 0x4000  # mode: Linux's MAP_NORESERVE, which Python's mmap names from 3.13 on
GEOMETRY = Geometry("mha", 2, 2, 64, 64, "float32", 16)
BLOCK_SHAPE = (2, 2, 16, 64)  # of one layer: keys and values, heads, tokens, dim


def far_memory(size_bytes: int) -> NDArray[np.uint8]:
    """Zeros that take memory only where they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return np.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), np.uint8)


def check_far(backend: Backend) -> None:
    """Write, decode and copy at offsets past 8 GiB. For backends that work in this process's memory."""
    arena = far_memory(FAR_BYTES + (1 << 20))
    rng = np.random.default_rng(0)
    units = np.array([1, (5 << 30) // UNIT_BYTES, FAR_BYTES // UNIT_BYTES])
    slots, table = SlotSpace(GEOMETRY, (arena.ctypes.data,)), table_entries(units)[None]
    keys, values = (rng.normal(size=(40, 2, 64)).astype(np.float32) for _ in range(2))
    context = np.array([40], np.int32)
    write_kv(backend, keys, values, slots, table, np.array([0, 40], np.int32), context, layer=1)
    for block, unit in enumerate(units):
        start = int(unit) * UNIT_BYTES + GEOMETRY.block_bytes // 2
        found = arena[start : start + GEOMETRY.block_bytes // 2].view(np.float32).reshape(BLOCK_SHAPE)
        tokens = slice(block * 16, min(block * 16 + 16, 40))
        count = tokens.stop - tokens.start
        assert (found[0, :, :count] == keys[tokens].transpose(1, 0, 2)).all(), f"block {block}: keys are elsewhere"
        assert (found[1, :, :count] == values[tokens].transpose(1, 0, 2)).all(), f"block {block}: values are elsewhere"
    q, out = np.zeros((1, 2, 64), np.float32), np.full((1, 2, 64), np.nan, np.float32)
    paged_decode(backend, q, out, slots, table, context, layer=1, max_context=40)
    assert np.allclose(out[0], values.mean(axis=0), atol=1e-5), "decoded from elsewhere"
    _check_far_engine(backend, arena, slots, table[0])


def _check_far_engine(backend: Backend, arena: NDArray[np.uint8], slots: SlotSpace, entries: NDArray[np.uint32]) -> None:
    """An engine whose blocks lie 3 GiB apart."""
    apart, count = 3 << 30, 3
    memory = far_memory((count - 1) * apart + (1 << 20))
    layers: list[Any] = []
    for layer in range(2):
        start = layer * GEOMETRY.block_bytes // 2
        whole = memory[start:].view()
        shape, strides = (count, *BLOCK_SHAPE), (apart, 8192, 4096, 256, 4)
        layers.append(np.ndarray(shape, np.float32, whole.data, strides=strides))
    copy_blocks(backend, slots, engine_tensors(backend, layers, "bkhtd"), entries, np.array([2, 0, 1], np.uint32))
    for entry, number in zip(entries, (2, 0, 1), strict=True):
        for layer in range(2):
            start = int(entry) * UNIT_BYTES + layer * GEOMETRY.block_bytes // 2
            want = arena[start : start + GEOMETRY.block_bytes // 2].view(np.float32).reshape(BLOCK_SHAPE)
            assert (layers[layer][number] == want).all(), f"block {number} went elsewhere"
