"""Random calls of the kernels with what must come out, computed in float64 straight from the documented layout of a block.

Nothing here uses the kernels' own layout code. All memory that may not be read is NaN, all that may not be written is compared after.
A case is made from (kernel, seed, …) alone, and `check_…` raises AssertionError, so tests, the sanitized run, the planted faults and a
GPU use the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.geometry import UNIT_BYTES, Geometry
from kvstore.kernels.backend import Backend
from kvstore.kernels.decode import Attention, Splits, paged_decode
from kvstore.kernels.layout import SlotSpace, table_entries
from tests.kernels.elements import RAW, Exact, Raw, allowed_error, decode, encode

BLOCK_TOKENS = (1, 5, 8, 16, 32)
UNUSED_ENTRY = 0xFFFFFFFF  # names an arena that is not there: whoever follows it does not get far
POISON = 0xFF  # bytes: NaN in every floating dtype


@dataclass
class Pool:
    """Arenas full of NaN, with slots of one geometry in them in random order."""

    geometry: Geometry
    arenas: list[NDArray[np.uint8]]
    places: list[tuple[int, int]] = field(default_factory=list)  # (arena, unit) of the slots not handed out

    @classmethod
    def make(cls, rng: np.random.Generator, geometry: Geometry, slots: int, arenas: int) -> Pool:
        per_arena = -(-slots // arenas)
        memory = [_aligned(per_arena * geometry.slot_bytes) for _ in range(arenas)]
        places = [(arena, index * geometry.slot_units) for arena in range(arenas) for index in range(per_arena)]
        return cls(geometry, memory, [places[index] for index in rng.permutation(len(places))])

    def take(self) -> tuple[int, int]:
        return self.places.pop()

    def tensors(self, place: tuple[int, int]) -> Raw:
        """A slot as [layer, key/value, head, token, dim], written down from the layout's definition."""
        arena, unit = place
        geometry = self.geometry
        start = unit * UNIT_BYTES
        elements: Raw = self.arenas[arena][start : start + geometry.block_bytes].view(RAW[geometry.dtype])
        return elements.reshape(geometry.layers, 2, geometry.kv_heads, geometry.block_tokens, geometry.key_dim)

    def entry(self, place: tuple[int, int]) -> int:
        return int(table_entries([place[1]], place[0])[0])

    def upload(self, backend: Backend) -> tuple[list[Any], SlotSpace]:
        """The arenas where the backend reaches them, and the kernels' view of them."""
        memory = [backend.upload(arena) for arena in self.arenas] if backend.on_device else list(self.arenas)
        return memory, SlotSpace(self.geometry, tuple(_address(each) for each in memory))


def _aligned(size: int) -> NDArray[np.uint8]:
    """NaN bytes that start on 16 bytes, ending exactly at the allocation's end."""
    whole = np.full(size + 15, POISON, np.uint8)
    skip = -whole.ctypes.data % 16
    return whole[skip : skip + size]


def _address(array: Any) -> int:
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


def back(array: Any) -> NDArray[Any]:
    """An array in this process's memory again."""
    return np.asarray(array.get() if hasattr(array, "get") else array)


# ---- decode


@dataclass
class DecodeCase:
    """One call of paged_decode: the slots, the queries, and what to expect."""

    pool: Pool
    queries: Raw
    table: NDArray[np.uint32]
    context: NDArray[np.int32]
    layer: int
    attention: Attention
    sink_logits: NDArray[np.float32] | None
    splits: Splits | None
    expected: Exact


def decode_case(seed: int, dtype: str, dim: int, group: int, longest: int = 150) -> DecodeCase:
    """Random heads, layers, block sizes, arenas and contexts. Windows, sinks and splits alternate: twelve seeds have met every mixture."""
    rng = np.random.default_rng([seed, dim, group, len(dtype)])
    kv_heads, batch, size = int(rng.integers(1, 4)), int(rng.integers(2, 5)), int(rng.choice(BLOCK_TOKENS))
    layers = int(rng.integers(1, 4))
    geometry = Geometry("mha", layers, kv_heads, dim, dim, dtype, size)
    context = np.array([rng.choice([0, 1, size, size + 1, int(rng.integers(1, longest))]) for _ in range(batch)], np.int32)
    context[rng.integers(batch)] = rng.integers(longest // 2, longest)
    attention = Attention()
    if seed % 2:
        attention = Attention(scale=float(rng.uniform(0.05, 0.5)), window=int(rng.integers(1, 40)), sink_tokens=int(rng.integers(0, 20)))
    sinks = rng.normal(size=kv_heads * group).astype(np.float32) if seed % 3 == 1 else None
    splits = None
    if seed % 4 < 2:
        tokens = int(rng.integers(1, 40))
        splits = Splits(max(1, -(-int(context.max()) // tokens)), tokens)
    blocks = -(-context // size)
    pool = Pool.make(rng, geometry, int(blocks.sum()) + 2, int(rng.integers(1, 4)))
    table = np.full((batch, int(blocks.max()) + 1), UNUSED_ENTRY, np.uint32)
    queries = encode(rng.normal(size=(batch, kv_heads * group, dim)) * 1.5, dtype)
    layer, expected = int(rng.integers(layers)), np.zeros(queries.shape)
    for row in range(batch):
        keys, values = (encode(rng.normal(size=(kv_heads, int(context[row]), dim)), dtype) for _ in range(2))
        seen = _visible(int(context[row]), attention)
        for index in range(int(blocks[row])):
            place = pool.take()
            table[row, index] = pool.entry(place)
            for token in range(index * size, min((index + 1) * size, int(context[row]))):
                if token in seen:  # the others keep their NaN
                    pool.tensors(place)[layer, :, :, token % size] = np.stack([keys[:, token], values[:, token]])
        if seen:
            expected[row] = attend(queries[row], keys[:, seen], values[:, seen], dtype, attention.scale or dim**-0.5, sinks)
    return DecodeCase(pool, queries, table, context, layer, attention, sinks, splits, expected)


def _visible(context: int, attention: Attention) -> list[int]:
    first = max(0, context - attention.window) if attention.window else 0
    return [token for token in range(context) if token >= first or token < attention.sink_tokens]


def attend(queries: Raw, keys: Raw, values: Raw, dtype: str, scale: float, sinks: NDArray[np.float32] | None = None) -> Exact:
    """Softmax attention in float64: queries [q_heads, dim], keys and values [kv_heads, token, dim] → [q_heads, dim]."""
    group = len(queries) // len(keys)
    out = np.zeros(queries.shape)
    for head in range(len(queries)):
        scores = decode(keys[head // group], dtype) @ decode(queries[head], dtype) * scale
        extra = np.array([] if sinks is None else [float(sinks[head])])
        top = max(*scores, *extra) if len(extra) else scores.max()
        weights = np.exp(scores - top)
        out[head] = weights @ decode(values[head // group], dtype) / (weights.sum() + np.exp(extra - top).sum())
    return out


def check_decode(backend: Backend, case: DecodeCase) -> None:
    """Run it and compare. The output is poisoned, with a gap between its rows that must stay as it is."""
    geometry = case.pool.geometry
    dtype, shape = geometry.dtype, case.queries.shape
    wide = np.full((shape[0], shape[1], shape[2] + 8), -1, np.int64).astype(RAW[dtype])
    out, (memory, slots) = backend.upload(wide), case.pool.upload(backend)
    sinks = None if case.sink_logits is None else backend.upload(case.sink_logits)
    fused = np.full((shape[0], shape[1], shape[2] + 8), -1, np.int64).astype(RAW[dtype])  # as a slice of a wider projection
    fused[:, :, : shape[2]] = case.queries
    arrays = [backend.upload(array) for array in (fused, case.table, case.context)]
    paged_decode(
        backend, _named(arrays[0][:, :, : shape[2]], dtype), _named(out[:, :, : shape[2]], dtype), slots, arrays[1], arrays[2],
        layer=case.layer, max_context=int(case.context.max()), attention=case.attention, sink_logits=sinks, splits=case.splits,
    )  # fmt: skip
    found = back(out)
    assert (found[:, :, shape[2] :] == wide[:, :, shape[2] :]).all(), "wrote past a row's end"
    error = np.abs(decode(found[:, :, : shape[2]], dtype) - case.expected)
    limit = allowed_error(case.expected, dtype)
    times = np.where(np.isnan(error), np.inf, error / np.maximum(limit, 1e-300)).max()
    assert (error <= limit).all(), f"off by {times:.3g} times the allowed error, {np.isnan(error).sum()} NaN"
    for before, after in zip(case.pool.arenas, memory, strict=True):
        assert (before == back(after)).all(), "a slot was written to"


def _named(array: Any, dtype: str) -> Any:
    """float32 has a name of its own; raw 16-bit integers are read as what the geometry says."""
    return array.view(np.float32) if dtype == "float32" else array
