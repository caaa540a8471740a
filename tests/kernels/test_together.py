"""The kernels one after the other, as a worker calls them: a prompt, step after step, forks, and memory far away."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.geometry import Geometry
from kvstore.kernels.copying import copy_slots
from kvstore.kernels.decode import paged_decode
from kvstore.kernels.host import HostBackend
from kvstore.kernels.writing import write_kv
from tests.kernels.cases import UNUSED_ENTRY, Pool, attend
from tests.kernels.elements import Raw, allowed_error, decode, encode
from tests.kernels.far_cases import check_far

Q_HEADS = 6


class Running:
    """Sequences that grow, in slots, beside all their K and V in plain arrays."""

    def __init__(self, backend: HostBackend, dtype: str, rows: int) -> None:
        self.backend, self.dtype = backend, dtype
        self.rng = np.random.default_rng(3)
        self.geometry = Geometry("mha", 2, 2, 64, 64, dtype, 8)
        self.pool = Pool.make(self.rng, self.geometry, 40, 2)
        _, self.slots = self.pool.upload(backend)
        self.places: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
        self.kept: list[list[Raw]] = [[np.zeros((2, 2, 0, 64), np.uint16) for _ in range(2)] for _ in range(rows)]

    @property
    def context(self) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array([kept[0].shape[2] for kept in self.kept], np.int32)

    @property
    def table(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
        found = np.full((len(self.places), 10), UNUSED_ENTRY, np.uint32)
        for row, places in enumerate(self.places):
            found[row, : len(places)] = [self.pool.entry(place) for place in places]
        return found

    def step(self, new: list[int]) -> None:
        """Write so many new tokens of each sequence, in both layers."""
        context = self.context + np.array(new, np.int32)
        for row, total in enumerate(context):
            while len(self.places[row]) * 8 < total:
                self.places[row].append(self.pool.take())
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        for layer in range(2):
            fresh = encode(self.rng.normal(size=(2, int(starts[-1]), 2, 64)), self.dtype)
            write_kv(self.backend, fresh[0], fresh[1], self.slots, self.table, starts, context, layer=layer)
            for row in range(len(new)):
                mine = fresh[:, starts[row] : starts[row + 1]].transpose(0, 2, 1, 3)
                self.kept[row][layer] = np.concatenate([self.kept[row][layer].astype(fresh.dtype), mine], axis=2)

    def check(self) -> None:
        """Decode each layer and compare."""
        context = self.context
        for layer in range(2):
            q = encode(self.rng.normal(size=(len(context), Q_HEADS, 64)), self.dtype)
            out = np.full(q.shape, 0xFFFF, np.uint16)
            paged_decode(self.backend, q, out, self.slots, self.table, context, layer=layer, max_context=int(context.max()))
            for row, kept in enumerate(self.kept):
                wanted = attend(q[row], kept[layer][0], kept[layer][1], self.dtype, 64**-0.5)
                assert (np.abs(decode(out[row], self.dtype) - wanted) <= allowed_error(wanted, self.dtype)).all(), f"row {row}"

    def fork(self, row: int) -> int:
        """A sequence that goes on from another's tokens: whole blocks are shared, the begun one is copied."""
        total = int(self.context[row])
        whole, begun = divmod(total, 8)
        places = self.places[row][:whole]
        if begun:
            places = [*places, self.pool.take()]
            of, to = (np.array([self.pool.entry(place)], np.uint32) for place in (self.places[row][whole], places[-1]))
            copy_slots(self.backend, self.slots, of, to, tokens=begun)
        self.places.append(places)
        self.kept.append([kept.copy() for kept in self.kept[row]])
        return len(self.places) - 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sequences_grow_by_prompts_and_steps_and_decode_as_if_contiguous(backend: HostBackend, dtype: str) -> None:
    running = Running(backend, dtype, 3)
    running.step([13, 1, 24])
    running.check()
    for _ in range(10):
        running.step([1, 1, 1])
        running.check()
    running.step([0, 9, 1])
    running.check()


@pytest.mark.parametrize("tokens", [7, 8, 9, 16, 20])
def test_a_fork_shares_whole_blocks_and_both_go_on_by_themselves(backend: HostBackend, tokens: int) -> None:
    running = Running(backend, "bfloat16", 1)
    running.step([tokens])
    other = running.fork(0)
    assert running.places[0][: tokens // 8] == running.places[other][: tokens // 8]
    for new in ([1, 1], [3, 0], [0, 9], [1, 1]):
        running.step(new)
        running.check()


def test_a_padded_row_of_a_batch_gives_zeros_and_writes_nothing(backend: HostBackend) -> None:
    running = Running(backend, "bfloat16", 2)
    running.step([5, 0])
    before = [arena.copy() for arena in running.pool.arenas]
    q, out = np.zeros((2, Q_HEADS, 64), np.uint16), np.full((2, Q_HEADS, 64), 0xFFFF, np.uint16)
    keys = encode(running.rng.normal(size=(1, 2, 64)), "bfloat16")
    write_kv(backend, keys, keys, running.slots, running.table[1:], np.array([0, 1], np.int32), np.zeros(1, np.int32), layer=0)
    paged_decode(backend, q, out, running.slots, running.table, running.context, layer=0, max_context=8)
    assert (out[1] == 0).all()
    assert all((one == other).all() for one, other in zip(before, running.pool.arenas, strict=True))


def test_offsets_past_32_bits_reach_their_slots(backend: HostBackend) -> None:
    check_far(backend)
