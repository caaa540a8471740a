"""Decode over slots, against float64: every dtype, head dim and kind of group, and what a call may and may not ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.errors import GeometryError, InvalidArgument
from kvstore.geometry import Geometry, Quant
from kvstore.kernels.decode import MAX_SPLITS, MIN_SPLIT_TOKENS, Attention, Splits, choose_splits, paged_decode
from kvstore.kernels.host import HostBackend
from kvstore.kernels.layout import SlotSpace, table_entries
from kvstore.kernels.variants import ELEMENTS, HEAD_DIMS
from tests.kernels.cases import check_decode, decode_case

GROUPS = (1, 2, 3, 4, 7, 8, 11)  # query heads a KV head: those of GROUPS, some between, and one taken in two parts
SEEDS = 2  # of each variant: with twelve, all mixtures of windows, sinks and splits; neighbouring variants have others


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_decode_is_right_to_the_last_place(backend: HostBackend, dtype: str, dim: int) -> None:
    for index, group in enumerate(GROUPS):
        for seed in range(index * SEEDS, (index + 1) * SEEDS):
            backend.reorder(seed)
            check_decode(backend, decode_case(seed, dtype, dim, group))


@pytest.mark.parametrize("seed", range(4))
def test_long_contexts_are_right_with_splits_as_chosen(backend: HostBackend, seed: int) -> None:
    check_decode(backend, decode_case(4 * seed + 2, "bfloat16", 128, 4, longest=2500))


class Simple:
    """One sequence in float32 with given K and V, [kv_heads, token, dim]; a call can be changed by keywords."""

    def __init__(self, keys: NDArray[np.float32], values: NDArray[np.float32], block_tokens: int = 16) -> None:
        heads, tokens, dim = keys.shape
        self.geometry = Geometry("mha", 1, heads, dim, dim, "float32", block_tokens)
        blocks = -(-tokens // block_tokens)
        self.arena = np.zeros(blocks * self.geometry.slot_bytes, np.uint8)
        for block in range(blocks):
            start = block * self.geometry.slot_bytes
            slot = self.arena[start : start + self.geometry.block_bytes].view(np.float32).reshape(2, heads, block_tokens, dim)
            part = slice(block * block_tokens, min((block + 1) * block_tokens, tokens))
            slot[:, :, : part.stop - part.start] = np.stack([keys[:, part], values[:, part]])
        self.slots = SlotSpace(self.geometry, (self.arena.ctypes.data,))
        self.table = table_entries([block * self.geometry.slot_units for block in range(blocks)])[None]
        self.context = np.array([tokens], np.int32)

    def decode(self, backend: HostBackend, q: NDArray[np.float32], **changed: Any) -> NDArray[np.float32]:
        out = np.full(q.shape, np.nan, np.float32)
        words = {"layer": 0, "max_context": int(self.context.max())} | changed
        paged_decode(backend, q, words.pop("out", out), self.slots, words.pop("table", self.table), self.context, **words)
        return out


def _tokens(*numbers: float) -> NDArray[np.float32]:
    """K or V of one head, every value of a token the same."""
    return np.repeat(np.array(numbers, np.float32)[None, :, None], 64, axis=2)


def test_a_zero_query_over_values_2_and_4_gives_3(backend: HostBackend) -> None:
    """With q = 0 both scores are 0 and both weights a half: 3; whoever reads the newest token alone answers 4."""
    keys = np.random.default_rng(0).normal(size=(1, 2, 64)).astype(np.float32)
    found = Simple(keys, _tokens(2, 4)).decode(backend, np.zeros((1, 1, 64), np.float32))
    assert (found == 3).all()


def test_swapping_keys_and_values_together_changes_nothing(backend: HostBackend) -> None:
    rng = np.random.default_rng(1)
    keys, values, q = rng.normal(size=(1, 2, 64)), rng.normal(size=(1, 2, 64)), rng.normal(size=(1, 1, 64)).astype(np.float32)
    one = Simple(keys.astype(np.float32), values.astype(np.float32)).decode(backend, q)
    other = Simple(keys[:, ::-1].astype(np.float32), values[:, ::-1].astype(np.float32)).decode(backend, q)
    mixed = Simple(keys[:, ::-1].astype(np.float32), values.astype(np.float32)).decode(backend, q)
    assert np.allclose(one, other, atol=1e-6)
    assert not np.allclose(one, mixed, atol=1e-2)


def test_scores_of_any_size_neither_overflow_nor_vanish(backend: HostBackend) -> None:
    """The largest score wins outright: exp of the others' distance is 0, not the exp of a score infinite."""
    for size in (1e4, -1e4, 1e30):
        found = Simple(_tokens(1, 2, 3), _tokens(5, 6, 7)).decode(backend, np.full((1, 1, 64), size, np.float32))
        assert (found == (7 if size > 0 else 5)).all(), size


def test_each_byte_of_keys_and_values_is_read_once_for_all_heads_of_a_group(backend: HostBackend) -> None:
    rng = np.random.default_rng(2)
    keys, values = (rng.normal(size=(3, 300, 64)).astype(np.float32) for _ in range(2))
    for group, reads in ((1, 1), (4, 1), (7, 1), (8, 1), (16, 2)):
        before = backend.loaded_bytes
        Simple(keys, values).decode(backend, rng.normal(size=(1, 3 * group, 64)).astype(np.float32))
        assert backend.loaded_bytes - before == reads * (keys.nbytes + values.nbytes)


def test_a_window_reads_no_more_than_it_attends_to(backend: HostBackend) -> None:
    rng = np.random.default_rng(3)
    keys, values = (rng.normal(size=(1, 900, 64)).astype(np.float32) for _ in range(2))
    before = backend.loaded_bytes
    Simple(keys, values).decode(backend, np.ones((1, 1, 64), np.float32), attention=Attention(window=100, sink_tokens=4))
    assert backend.loaded_bytes - before == 104 * 64 * 4 * 2


def test_two_runs_give_the_same_bits(backend: HostBackend) -> None:
    rng = np.random.default_rng(4)
    keys, values = (rng.normal(size=(2, 700, 64)).astype(np.float32) for _ in range(2))
    simple = Simple(keys, values)
    q = rng.normal(size=(1, 8, 64)).astype(np.float32)
    found = []
    for seed in range(3):
        backend.reorder(seed)
        found.append(simple.decode(backend, q, splits=Splits(7, 100)).tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer": 1}, "layer 1 of 1"),
        ({"max_context": 17}, "the block table holds 16 tokens"),
        ({"max_context": -1}, "max_context is -1"),
        ({"splits": Splits(1, 1)}, "do not hold the 2 visible"),
        ({"attention": Attention(window=-1)}, "window is -1"),
        ({"attention": Attention(sink_tokens=4)}, "give a window too"),
        ({"sink_logits": np.zeros(2, np.float32)}, r"give float32 \[1\]"),
        ({"sink_logits": np.zeros(1)}, "sink_logits is float64"),
        ({"table": np.zeros((1, 1), np.int64)}, "table is int64"),
        ({"table": np.zeros((2, 1), np.uint32)}, r"give uint32 \[1, \*\]"),
        ({"table": np.zeros((1, 4), np.uint32)[:, ::2]}, "must be contiguous"),
        ({"out": np.zeros((1, 1, 65), np.float32)}, "out is float32"),
        ({"out": "not an array"}, "a str is no array"),
    ],
)
def test_a_wrong_argument_is_named(backend: HostBackend, changed: dict[str, Any], message: str) -> None:
    simple = Simple(_tokens(1, 2), _tokens(2, 4))
    with pytest.raises(InvalidArgument, match=message):
        simple.decode(backend, np.zeros((1, 1, 64), np.float32), **changed)


def test_queries_that_cannot_be_read_16_bytes_at_a_time_are_refused(backend: HostBackend) -> None:
    with pytest.raises(InvalidArgument, match="16 bytes at a time"):
        Simple(_tokens(1, 2), _tokens(2, 4)).decode(backend, np.zeros((1, 1, 68), np.float32)[:, :, 1:65])


def test_head_counts_that_do_not_divide_are_refused(backend: HostBackend) -> None:
    simple = Simple(np.zeros((2, 3, 64), np.float32), np.zeros((2, 3, 64), np.float32))
    for heads in (1, 3):
        with pytest.raises(GeometryError, match=f"{heads} query heads over 2 KV heads"):
            simple.decode(backend, np.zeros((1, heads, 64), np.float32))


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry("mha", 1, 1, 48, 48, "float32", 16),
        Geometry("mha", 1, 1, 64, 64, "float64", 16),
        Geometry("mha", 1, 1, 64, 128, "float32", 16),
        Geometry("mha", 1, 1, 64, 64, "float32", 16, quant=Quant("symmetric", "head")),
        Geometry("mha", 1, 1, 64, 64, "float32", 16, format="engine", opaque_block_bytes=4096),
        Geometry.mla(layers=1, latent_dim=64, rope_dim=0, dtype="float32", block_tokens=16),
    ],
)
def test_a_geometry_without_a_kernel_is_refused(backend: HostBackend, geometry: Geometry) -> None:
    q = np.zeros((1, 1, geometry.key_dim), np.float64 if geometry.dtype == "float64" else np.float32)
    with pytest.raises(GeometryError, match=r"decode kernel"):
        paged_decode(backend, q, q, SlotSpace(geometry, (4096,)), np.zeros((1, 1), np.uint32), np.ones(1, np.int32), layer=0, max_context=1)


def test_splits_fill_the_device_and_hold_all_tokens() -> None:
    for blocks in (1, 8, 64, 500, 5000):
        for tokens in (0, 1, 63, 255, 256, 4000, 131_072):
            chosen = choose_splits(blocks, tokens, 132 * 3)
            assert chosen.count * chosen.tokens >= tokens
            assert (chosen.count - 1) * chosen.tokens < max(tokens, 1), "a split without tokens"
            assert 1 <= chosen.count <= MAX_SPLITS
            assert chosen.count == 1 or tokens // chosen.count >= MIN_SPLIT_TOKENS // 2
    assert 8 * choose_splits(8, 131_072, 396).count >= 0.8 * 396
    assert choose_splits(128, 8192, 396).count == 3, "one round of 384, not one and a third of 512"
    assert choose_splits(1024, 131_072, 396).count == 1
