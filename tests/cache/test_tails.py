"""Partial tails: what is found beyond whole blocks, against a naive radix tree whose pages are single tokens; and what ends it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.cache.messages import (
    ALL_BLOCKS,
    Abandon,
    Acquire,
    Acquired,
    Commit,
    Committed,
    EndReason,
    Granted,
    Keep,
    KeepKind,
    NamespaceSpec,
    Prompt,
    Recovered,
    Refused,
    Release,
    Reserve,
    Reserved,
    StartRead,
    TransferDone,
    TransferResult,
    unpack_hashes,
)
from kvstore.cache.tails import MAX_CHILDREN
from kvstore.cache.tokens import CHUNK_BYTES, CHUNK_TOKENS, ROW_BYTES
from kvstore.hashing import block_hashes
from tests.cache.bench import ROOT, SIZE, UNIT, Bench
from tests.cache.prompts import common


def naive(stored: list[list[int]], prompt: list[int], size: int) -> int:
    """What a radix tree over single tokens would find of what whole blocks hold."""
    return min([len(prompt) - 1, max((common(prompt, each[: len(each) // size * size]) for each in stored), default=0)])


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5 * SIZE)


@settings(max_examples=250, deadline=None)
@given(stored=st.lists(prompts, max_size=8), asked=st.lists(prompts, min_size=1, max_size=6))
def test_the_hit_is_that_of_a_radix_tree(stored: list[list[int]], asked: list[list[int]]) -> None:
    bench = Bench()
    for prompt in stored:
        if len(prompt) >= SIZE:
            bench.put(prompt)
    for prompt in asked:
        blocks, tail = bench.get(prompt)
        assert blocks * SIZE + tail == naive(stored, prompt, SIZE)
    bench.check()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 2, *(CHUNK_TOKENS + each for each in (-1, 0, 1)), 2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS + 1]))
def test_blocks_of_any_size_share_their_tokens(data: st.DataObject, size: int) -> None:
    bench, many = Bench(size=size), st.lists(st.integers(0, 3 * size), max_size=4)
    runs = [[number for cut in data.draw(many) for number in [cut] * size][: 3 * size] or [7] for _ in range(5)]
    prompts = [run + [2**32 - 1] * data.draw(st.integers(0, size)) for run in runs]
    for prompt in prompts:
        if len(prompt) >= size:
            bench.put(prompt)
    for prompt in prompts:
        cut = prompt[: data.draw(st.integers(1, len(prompt)))]
        for asked in (cut, [*cut, 5, 5]):
            blocks, tail = bench.get(asked)
            assert blocks * size + tail == naive(prompts, asked, size)
    bench.check()


def test_the_donor_is_leased_after_the_whole_blocks() -> None:
    bench = Bench(blocks=2)
    bench.put([1, 1, 1, 1, 2, 2, 2, 2])
    answer = bench.ask([1, 1, 1, 1, 2, 2, 3])
    assert isinstance(answer, Acquired)
    assert (answer.expected, answer.tail_tokens, answer.reason) == (2, 2, EndReason.COMPLETE)
    (grant,) = [each for each in bench.cache.drain() if isinstance(each, Granted)]
    assert grant.units.shape == (1, 2)
    assert grant.ended is EndReason.COMPLETE
    slots = bench.cache.reserve(Reserve(1, 5, 1, 1))
    assert isinstance(slots, Reserved)
    assert not slots.units.size, "the donor is held"
    bench.cache.release(Release(1, bench.leases, keep_blocks=1))
    slots = bench.cache.reserve(Reserve(1, 5, 1, 1))
    assert isinstance(slots, Reserved)
    assert slots.units.size == 1, "released from the tail, it is not"
    bench.check()


def test_why_a_prefix_ended_is_told_of_its_whole_blocks() -> None:
    bench = Bench()
    bench.put([1, 1, 1, 1, 2, 2, 2, 2])
    answer = bench.ask([1, 1, 1, 1, 2, 2, 3, 3, 4])
    assert isinstance(answer, Acquired)
    assert (answer.expected, answer.tail_tokens, answer.reason) == (2, 2, EndReason.MISSING)


@pytest.mark.parametrize("place", range(8))
def test_tokens_of_another_block_are_refused_and_nothing_is_stored(place: int) -> None:
    bench = Bench()
    prompt = [1, 1, 1, 1, 2, 2, 2, 2]
    other = [token + (i == place) for i, token in enumerate(prompt)]
    done = bench.put(prompt, other)
    assert isinstance(done, Refused)
    assert done.code == "INVALID_ARGUMENT"
    assert f"block {place // SIZE}" in done.text
    assert bench.get(prompt) == (0, 0)
    assert bench.get(other) == (0, 0)
    assert bench.cache.stats().counters["wrong_tokens"] == 1
    bench.check()


@pytest.mark.parametrize("count", [0, 1, SIZE, 2 * SIZE - 1, 2 * SIZE + 1, 3 * SIZE])
def test_token_ids_of_a_part_of_the_blocks_are_refused(count: int) -> None:
    hashes = unpack_hashes(block_hashes(ROOT, [1] * 2 * SIZE, SIZE))
    bench = Bench()
    slots = bench.cache.reserve(Reserve(1, 1, 1, 2))
    assert isinstance(slots, Reserved)
    tokens = np.ones(count, np.uint32)
    answer = bench.cache.commit(Commit(1, 1, 1, slots.units, slots.generations, hashes, unpack_hashes(ROOT), tokens=tokens))
    assert isinstance(answer, Refused)
    bench.check()


def test_a_prompt_of_another_root_has_no_tail() -> None:
    bench = Bench()
    bench.put([1, 1, 1, 1])
    prompt = Prompt(b"s" * 32, np.array([1, 1, 1], np.uint32))
    answer = bench.cache.acquire(Acquire(1, 99, unpack_hashes(b""), 1.0, 1, prompt=prompt), 0.0)
    assert isinstance(answer, Acquired)
    assert (answer.expected, answer.tail_tokens) == (0, 0)


def test_what_is_evicted_is_no_donor_and_its_ids_are_gone() -> None:
    bench = Bench(blocks=4)
    bench.put([1] * SIZE)
    for word in range(2, 6):
        bench.put([word] * SIZE)
    assert bench.get([1, 1, 1]) == (0, 0)
    assert bench.get([5, 5, 5]) == (0, 2)
    stats = bench.cache.stats()
    assert stats.tail_blocks == 4
    assert stats.tail_bytes == 4 * (CHUNK_BYTES + ROW_BYTES)
    bench.check()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_chain_that_is_pushed_out_at_once_leaves_no_ids(compiled: bool) -> None:
    bench = Bench(blocks=16)
    if not compiled:
        bench.cache.state.index.native = None
    bench.put(list(range(16 * SIZE)))
    slots = bench.cache.reserve(Reserve(1, 2, 1, 10))
    assert isinstance(slots, Reserved)
    assert len(slots.units) == 10
    assert bench.cache.stats().tail_blocks == 6
    bench.check()
    bench.cache.abandon(Abandon(1, 2))
    bench.put(list(range(100, 100 + 10 * SIZE)))
    assert bench.cache.stats().tail_blocks == 16
    bench.check()


def test_cleared_blocks_leave_no_ids() -> None:
    bench = Bench(size=40)
    bench.put([1] * 120)
    assert bench.cache.stats().tail_bytes == 3 * (3 * CHUNK_BYTES + ROW_BYTES)
    bench.cache.clear(1, (1,))
    assert bench.cache.stats().tail_bytes == 0
    bench.check()


def test_a_block_stored_without_ids_gets_them_from_who_commits_it_again() -> None:
    bench = Bench()
    bench.put([1] * 8, bare=True)
    assert bench.cache.stats().tail_blocks == 0
    bench.put([1] * 8)
    assert bench.get([1, 1, 1, 1, 1, 1, 3]) == (1, 2)
    bench.check()


def test_a_block_stored_without_ids_gets_them_from_who_reads_it() -> None:
    bench = Bench()
    bench.put([1] * 8, bare=True)
    assert bench.get([1, 1, 1, 1, 1, 1, 3]) == (1, 0), "nobody has told the second block's"
    assert bench.get([1] * 9) == (2, 0)
    assert bench.get([1, 1, 1, 1, 1, 1, 3]) == (1, 2)
    bench.check()


def test_who_reads_cannot_give_a_block_ids_that_are_not_its_own() -> None:
    bench = Bench()
    bench.put([1] * 4, bare=True)
    hashes = unpack_hashes(block_hashes(ROOT, [1] * 4, SIZE))
    bench.cache.acquire(Acquire(1, 9, hashes, 1.0, 1, prompt=Prompt(ROOT, np.array([1, 1, 1, 2, 3], np.uint32))), 0.0)
    assert bench.cache.stats().tail_blocks == 0
    bench.check()


def test_a_block_that_hangs_from_another_parent_is_no_donor() -> None:
    bench = Bench()
    bench.put([1] * 4, bare=True, parent=b"s" * 32)
    bench.put([1] * 4)
    assert bench.cache.stats().tail_blocks == 0
    bench.check()


def recovered(bench: Bench, *prompts: list[int]) -> None:
    """Blocks as a disk has them: without token ids."""
    hashes = [unpack_hashes(block_hashes(ROOT, tokens, SIZE)) for tokens in prompts]
    parents = np.concatenate([np.concatenate([unpack_hashes(ROOT), mine[:-1]]) for mine in hashes])
    count = len(parents)
    numbers, sums = np.arange(count, dtype=np.uint32), np.zeros((count, 2), np.uint64)
    found = Recovered(np.ones(count, np.int32), np.concatenate(hashes), parents, numbers, numbers + 1, sums, suspect=False)
    assert bench.cache.recover(found) == count


def test_blocks_of_a_disk_are_donors_again_once_read_and_come_up_for_it() -> None:
    bench = Bench(nvme_blocks=8)
    recovered(bench, [1] * 8)
    assert bench.ask([1, 1, 1, 1, 1, 1, 2]) == Acquired(1, 1, EndReason.COMPLETE)
    assert bench.ask([1] * 9) == Acquired(2, 2, EndReason.COMPLETE)
    answer = bench.ask([1, 1, 1, 1, 1, 1, 2])
    assert isinstance(answer, Acquired)
    assert (answer.expected, answer.tail_tokens) == (2, 2)
    reads = [each for each in bench.cache.drain() if isinstance(each, StartRead)]
    assert len(reads) == 2
    for read in reads:
        bench.cache.transfer_done(TransferDone(read.transfer, TransferResult.OK, read.checksum), 0.0)
    grants = [each for each in bench.cache.drain() if isinstance(each, Granted) and each.lease == bench.leases]
    assert sum(each.units.shape[1] for each in grants) == 2
    bench.check()


def test_a_donor_that_cannot_be_read_ends_the_prefix_before_it() -> None:
    bench = Bench(nvme_blocks=8)
    recovered(bench, [1] * 8)
    bench.get([1] * 9)
    bench.cache.drain()
    bench.ask([1, 1, 1, 1, 1, 1, 2])
    for transfer in list(bench.cache.state.transfers.values()):
        failed = transfer.row == bench.cache.state.index.find_one(1, block_hashes(ROOT, [1] * 8, SIZE)[32:])
        result = TransferResult.FAILED if failed else TransferResult.OK
        bench.cache.transfer_done(TransferDone(transfer.id, result, (0, 0)), 0.0)
    grants = [each for each in bench.cache.drain() if isinstance(each, Granted) and each.lease == bench.leases]
    assert sum(each.units.shape[1] for each in grants) == 1
    assert grants[-1].ended is EndReason.FAILED
    bench.check()


@pytest.mark.parametrize("promoted", [2, 3])
def test_of_equal_donors_one_in_memory_is_taken(promoted: int) -> None:
    bench = Bench(nvme_blocks=8)
    recovered(bench, [1, 1, 1, 2], [1, 1, 1, 3])
    for last in (2, 3):
        bench.get([1, 1, 1, last, 4])
    reads = list(bench.cache.state.transfers.values())
    bench.cache.transfer_done(TransferDone(reads[promoted - 2].id, TransferResult.OK, (0, 0)), 0.0)
    bench.cache.drain()
    assert bench.ask([1, 1, 1, 4]) == Acquired(3, 1, EndReason.COMPLETE, 3)
    (grant,) = [each for each in bench.cache.drain() if isinstance(each, Granted)]
    assert grant.units.shape == (1, 1)
    bench.check()


def test_only_the_newest_children_are_looked_at() -> None:
    bench = Bench(blocks=2 * MAX_CHILDREN)
    for word in range(MAX_CHILDREN + 1):
        bench.put([word] * SIZE)
    assert bench.get([0, 0, 0]) == (0, 0)
    assert bench.get([1, 1, 1]) == (0, 2)


def test_when_chunks_run_out_blocks_are_stored_without_ids() -> None:
    bench = Bench(blocks=8, size=3 * CHUNK_TOKENS, index_blocks=10)
    for word in range(5):
        assert isinstance(bench.put([word] * 3 * CHUNK_TOKENS), Committed)
    stats = bench.cache.stats()
    assert (stats.tail_blocks, stats.counters["tokens_not_kept"]) == (3, 2)
    assert stats.tail_bytes == 3 * (3 * CHUNK_BYTES + ROW_BYTES)
    assert bench.get([4] * 3 * CHUNK_TOKENS + [1]) == (1, 0)
    bench.check()


def test_a_namespace_without_tails_takes_no_tokens_and_a_group_no_prompt() -> None:
    bench = Bench(tails=False)
    assert isinstance(bench.put([1] * 4), Refused)
    assert isinstance(bench.ask([1] * 5), Refused)
    assert bench.cache.stats().tail_capacity_bytes == 0
    bench = Bench()
    bench.cache.join_group(1, "g", (1,))
    prompt = Prompt(ROOT, np.array([1, 1], np.uint32))
    assert isinstance(bench.cache.acquire(Acquire(1, 9, unpack_hashes(bytes(32)), 1.0, 0, "g", prompt), 0.0), Refused)


def test_a_namespace_gets_tails_when_it_is_opened_with_them_and_keeps_them() -> None:
    bench = Bench(tails=False)
    bench.put([1] * 4, bare=True)
    for tails in (True, False):
        assert bench.cache.open_namespace(NamespaceSpec("t", bytes(32), 1, UNIT, ALL_BLOCKS, SIZE, tails)) == 1
    bench.put([1] * 4)
    assert bench.get([1, 1, 1]) == (0, 2)
    bench.check()


@pytest.mark.parametrize(("keep", "tokens"), [(Keep(KeepKind.WINDOW, 2), 4), (Keep(KeepKind.STATE), 4), (ALL_BLOCKS, 0)])
def test_tails_need_all_blocks_of_a_known_size(keep: Keep, tokens: int) -> None:
    answer = Bench().cache.open_namespace(NamespaceSpec("t", b"1" * 32, 1, UNIT, keep, tokens, tails=True))
    assert isinstance(answer, Refused)
    assert answer.code == "INVALID_ARGUMENT"
