"""Replays: what they find is what a naive count finds, whoever is evicted, and the optimum bounds them all."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kvstore.bench.replay_machine import Machine
from kvstore.bench.replay_tiers import OPTIMUM, Outcome, Replay, Setup
from kvstore.bench.replay_trace import BLOCK_TOKENS, EXCERPT, NEVER, Request, Trace, read_trace
from kvstore.cache.core import Cache
from kvstore.cache.eviction.choice import POLICIES
from kvstore.cache.invariants import violations

AT_ONCE = Machine(nvme_read_bytes_per_s=math.inf, nvme_write_bytes_per_s=math.inf)
EVERY = [*POLICIES, OPTIMUM]
SHORT = 150  # requests: a replay of them takes a quarter of a second


@pytest.fixture(scope="module")
def excerpt() -> Trace:
    return read_trace(EXCERPT)


@pytest.fixture(scope="module")
def short() -> Trace:
    return read_trace(EXCERPT, SHORT)


def hits(trace: Trace, setup: Setup, machine: Machine = AT_ONCE) -> int:
    outcome = Replay(trace, setup, machine).run()
    return outcome.dram_hit_blocks + outcome.nvme_hit_blocks


def seen_before(trace: Trace) -> int:
    """Blocks that an earlier prompt has had, counted without a cache."""
    seen: set[int] = set()
    count = 0
    for request in trace.requests:
        blocks = set(request.blocks.tolist())
        count += len(blocks & seen)
        seen |= blocks
    return count


def belady(trace: Trace, capacity: int) -> int:
    """Hits of the offline optimum: evict whatever is used last from now on, but nothing that the prompt at hand has."""
    next_use: dict[int, int] = {}
    count = 0
    for number, request in enumerate(trace.requests):
        blocks = request.blocks.tolist()
        found = next((i for i, block in enumerate(blocks) if block not in next_use), len(blocks))
        count += found
        for block, coming in zip(blocks, trace.next_uses[number].tolist(), strict=True):
            if block not in next_use and len(next_use) == capacity:
                del next_use[max(next_use.keys() - set(blocks), key=lambda other: (next_use[other], other))]
            next_use[block] = coming
    return count


def test_an_unlimited_cache_finds_all_that_came_before(excerpt: Trace) -> None:
    outcome = Replay(excerpt, Setup(excerpt.distinct_blocks), Machine()).run()
    assert outcome.dram_hit_blocks == seen_before(excerpt) == 5791
    assert excerpt.touched_blocks == 27_305
    assert outcome.stored_blocks == excerpt.distinct_blocks
    assert outcome.counters == {"committed": excerpt.distinct_blocks}


@pytest.mark.parametrize("eviction", EVERY)
def test_a_fast_disk_of_any_size_finds_what_memory_would(short: Trace, eviction: str) -> None:
    """All that is evicted from dram is on the disk."""
    setup = Setup(400, short.distinct_blocks, eviction)
    outcome = Replay(short, setup, AT_ONCE).run()
    assert outcome.dram_hit_blocks + outcome.nvme_hit_blocks == seen_before(short)
    assert outcome.counters["evicted_dram"] > 0
    assert outcome.counters["demoted"] == short.distinct_blocks


@pytest.mark.parametrize("capacity", [300, 600, 1200])
def test_the_optimum_is_beladys(short: Trace, capacity: int) -> None:
    assert hits(short, Setup(capacity, eviction=OPTIMUM)) == belady(short, capacity)


@pytest.mark.parametrize("capacity", [300, 600, 1200])
@pytest.mark.parametrize("eviction", POLICIES)
def test_no_policy_beats_the_optimum(short: Trace, eviction: str, capacity: int) -> None:
    assert 0 < hits(short, Setup(capacity, eviction=eviction)) <= belady(short, capacity)


@pytest.mark.parametrize("eviction", EVERY)
@pytest.mark.parametrize("nvme_write", ["through", "on_evict"])
def test_all_rules_hold_throughout(eviction: str, nvme_write: str) -> None:
    trace = read_trace(EXCERPT, 25)

    def check(cache: Cache) -> None:
        assert violations(cache.state) == []

    slow = dataclasses.replace(Machine(), nvme_write_bytes_per_s=4e9)
    outcome = Replay(trace, Setup(180, 250, eviction, nvme_write), slow, check).run()
    assert outcome.counters["evicted_dram"] > 0


def test_a_replay_repeats_itself() -> None:
    trace = read_trace(EXCERPT, 60)
    for eviction in EVERY:
        setup = Setup(200, 600, eviction)
        assert Replay(trace, setup, Machine()).run() == Replay(trace, setup, Machine()).run()


def test_a_prompt_larger_than_memory_stores_what_fits(short: Trace) -> None:
    outcome = Replay(short, Setup(8), Machine()).run()
    assert outcome.stored_blocks > 0
    assert outcome.dram_hit_blocks > 0


# ---- time


def prompts(*at_s: float, blocks: int = 4, apart: bool = False) -> Trace:
    """The same prompt again and again, or each time another."""
    requests = [
        Request(at, blocks * BLOCK_TOKENS, np.arange(blocks) + (number * blocks if apart else 0)) for number, at in enumerate(at_s)
    ]
    return Trace("made", tuple(requests), blocks * (len(at_s) if apart else 1))


def _once_more(trace: Trace, at_s: float) -> Trace:
    return dataclasses.replace(trace, requests=(*trace.requests, dataclasses.replace(trace.requests[0], at_s=at_s)))


ONE_A_SECOND = Machine(
    nvme_read_bytes_per_s=Machine().block_bytes, nvme_write_bytes_per_s=math.inf, dram_bytes_per_s=math.inf, acquire_timeout_s=3.5
)


def waited_s(outcome: Outcome, trace: Trace, machine: Machine, found: list[int]) -> float:
    computed = sum(machine.warm_s(request.input_tokens, blocks, 0.0) for request, blocks in zip(trace.requests, found, strict=True))
    return outcome.warm_s - computed


def test_a_prompt_waits_for_the_disk_as_long_as_its_bytes_take() -> None:
    trace = _once_more(prompts(0.0, 1.0, blocks=3, apart=True), 2.0)
    outcome = Replay(trace, Setup(3, 8), ONE_A_SECOND).run()
    assert (outcome.dram_hit_blocks, outcome.nvme_hit_blocks) == (0, 3)
    assert waited_s(outcome, trace, ONE_A_SECOND, [0, 0, 3]) == pytest.approx(3.0)


def test_a_prompt_waits_no_longer_than_the_deadline() -> None:
    trace = _once_more(prompts(0.0, 1.0, blocks=5, apart=True), 2.0)
    outcome = Replay(trace, Setup(5, 12), ONE_A_SECOND).run()
    assert outcome.nvme_hit_blocks == 3
    assert waited_s(outcome, trace, ONE_A_SECOND, [0, 0, 3]) == pytest.approx(3.5)
    assert outcome.counters["acquire_deadlines"] == 1
    assert outcome.cold_s == pytest.approx(3 * ONE_A_SECOND.cold_s(5 * BLOCK_TOKENS))  # nobody waits for ever


def test_two_prompts_that_wait_for_one_block_read_it_once() -> None:
    trace = _once_more(_once_more(prompts(0.0, 1.0, blocks=3, apart=True), 2.0), 2.5)
    outcome = Replay(trace, Setup(3, 8), ONE_A_SECOND).run()
    assert outcome.nvme_hit_blocks == 6
    assert outcome.counters["promoted"] == 3


def test_what_a_slow_disk_has_not_written_is_dropped() -> None:
    trace = prompts(*(0.1 * i for i in range(40)), blocks=3, apart=True)
    slow = dataclasses.replace(ONE_A_SECOND, nvme_write_bytes_per_s=Machine().block_bytes / 2)
    outcome = Replay(trace, Setup(30, 200), slow).run()
    counters = outcome.counters
    assert (outcome.stored_blocks, counters["dropped_before_written"], counters["demoted"]) == (120, 90, 30)


# ---- the model of time, and the trace's own arithmetic


def test_computing_is_a_sum_over_its_parts() -> None:
    machine = Machine(prefill_tokens_per_s=1000, quadratic_tokens=2000)
    assert machine.cold_s(1000) == pytest.approx(1.25)
    assert machine.compute_s(0, 700) + machine.compute_s(700, 1000) == pytest.approx(machine.cold_s(1000))


def test_the_last_token_is_always_computed() -> None:
    machine = Machine(dram_bytes_per_s=math.inf)
    assert machine.warm_s(2 * BLOCK_TOKENS, 2, 0.0) == machine.compute_s(BLOCK_TOKENS, 2 * BLOCK_TOKENS)
    assert machine.warm_s(2 * BLOCK_TOKENS + 1, 2, 0.0) == machine.compute_s(2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1)
    assert machine.warm_s(1, 1, 0.0) == machine.cold_s(1)


def test_copying_and_waiting_take_their_time() -> None:
    machine = Machine(token_bytes=1000, dram_bytes_per_s=1000 * BLOCK_TOKENS)
    assert machine.warm_s(3 * BLOCK_TOKENS + 1, 3, 0.5) - machine.compute_s(3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS + 1) == pytest.approx(3.5)


def test_next_uses_are_those_of_the_trace() -> None:
    trace = Trace("made", tuple(Request(i, 1024, np.array(blocks)) for i, blocks in enumerate([[0, 1], [2, 3], [0, 3], [0, 1]])), 4)
    assert [uses.tolist() for uses in trace.next_uses] == [[2, 3], [NEVER, 2], [3, NEVER], [NEVER, NEVER]]
