"""A batch whose KV does not fit memory runs to its end: sequences give way, their blocks go to the disk, and come back for their turn."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.clients.blocks import Prompt, Slots
from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.engine import Engine, Options
from kvstore.worker.model import LoadedModel
from kvstore.worker.plain import generate_plain
from kvstore.worker.requests import Request
from kvstore.worker.scheduler import SLICE_TOKENS, Rules
from tests.daemon.faulty import FaultyDaemon
from tests.worker.stores import BLOCK_TOKENS, Watched, prompt, small_store

CHUNKED = Options(Rules(step_tokens=64), patience_s=30.0, keep_logits=False)
DRAM, DRAM_BYTES = "2MiB", 2 << 20  # 170 of the tiny model's slots
REQUESTS = [Request(prompt(120, seed=seed), 130) for seed in range(17)]
FULL_BLOCKS = 31  # blocks of 8 tokens that each of them fills
MOST_STOPS = 1 + -(-130 // SLICE_TOKENS)  # stops: one after it came, and one for each time slice
WAIT_S = 60.0  # seconds: far beyond what anything here takes


@pytest.fixture(scope="module")
def plain(tiny: LoadedModel) -> list[list[int]]:
    """What transformers alone makes of REQUESTS."""
    return [generate_plain(tiny, request.tokens, request.max_tokens).tokens for request in REQUESTS]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultyDaemon]:
    """A daemon with little memory over a disk that does what a test says."""
    with FaultyDaemon(tmp_path, dram=DRAM, nvme_bytes="32MiB") as daemon:
        yield daemon


def opened(loaded: LoadedModel, daemon: DaemonProcess) -> Watched:
    with KVClient(daemon.address) as client:
        return Watched(client.open_blocks(loaded.identity, loaded.geometry(BLOCK_TOKENS)))


def counted(daemon: DaemonProcess) -> dict[str, int]:
    with KVClient(daemon.address) as client:
        return dict(client.stats().counters)


def test_three_times_as_much_as_memory_holds_comes_to_its_end(tiny: LoadedModel, plain: list[list[int]]) -> None:
    with DaemonProcess(dram=DRAM, nvme_bytes="32MiB") as daemon:
        store = opened(tiny, daemon)
        assert len(REQUESTS) * FULL_BLOCKS * store.geometry.slot_bytes >= 3 * DRAM_BYTES
        engine = Engine(tiny, store, CHUNKED)
        done = engine.generate(REQUESTS)
        figures = engine.figures()
        engine.close()
        assert store.flush(WAIT_S)
        store.close()
        promoted = counted(daemon)["promoted"]
    assert [each.tokens for each in done] == plain
    assert figures["preemptions_total"] > 0
    assert max(each.preemptions for each in done) <= MOST_STOPS
    assert figures["resumed_hit_tokens_total"] >= 0.9 * figures["resumed_tokens_total"] > 0
    assert promoted > 0, "nothing came back from the disk"
    assert figures["held_blocks"] == 0


def test_a_disk_that_hangs_is_not_waited_for(tiny: LoadedModel, plain: list[list[int]], disk: FaultyDaemon) -> None:
    store = opened(tiny, disk)
    engine = Engine(tiny, store, CHUNKED)
    disk.fault("stuck", "read")
    done = engine.generate(REQUESTS)
    disk.heal()
    figures = engine.figures()
    assert [each.tokens for each in done] == plain
    assert figures["preemptions_total"] > 0
    assert figures["resumed_hit_tokens_total"] < figures["resumed_tokens_total"], "nothing had to be computed again"
    engine.close()
    store.close()


def test_a_load_that_takes_longer_than_computing_is_cut(tiny: LoadedModel, disk: FaultyDaemon) -> None:
    """Two prompts fill memory in turn; the first comes back over a disk on which each block takes half a second."""
    store = opened(tiny, disk)
    engine = Engine(tiny, store, CHUNKED)
    one, other = (Request(prompt(500, seed=seed), 1) for seed in (1, 2))
    expected = generate_plain(tiny, one.tokens, 1).tokens
    fill = [Request(prompt(500, seed=seed), 1) for seed in range(3, 6)]
    engine.generate([one, other])
    engine.generate(fill)
    disk.fault("slow 0.5", "read")
    cut = engine.generate([one])[0]
    disk.heal()
    assert cut.tokens == expected
    assert cut.hit_tokens < 496
    assert cut.timings.acquire_s < 496 / BLOCK_TOKENS * 0.5 / 4, "it was waited for"
    engine.close()
    store.close()


def test_those_that_run_go_on_while_a_stopped_one_is_loaded(tiny: LoadedModel) -> None:
    goes_on = threading.Event()

    class Slow(Watched):
        def acquire(self, lease: int, hashes: bytes, timeout_s: float, prompt: Prompt | None = None) -> Slots:
            if engine.figures().get("preemptions_total"):
                assert goes_on.wait(WAIT_S), "nobody computed while this was loaded"
            return super().acquire(lease, hashes, timeout_s, prompt)

    engine = Engine(tiny, Slow(small_store(tiny, blocks=64).inner), CHUNKED)
    requests = [Request(prompt(60, seed=seed), 100) for seed in range(2)]
    jobs = [engine.add(request, lambda _: None) for request in requests]
    made_before = 0
    with engine.at_work():
        while engine.step():
            stopped, runs = jobs[1].branches[0], jobs[0].branches[0]
            if not engine.figures().get("preemptions_total") and len(stopped.made) == 20:
                engine._lives.preempt(stopped)
                made_before = len(runs.made)
            if made_before and len(runs.made) >= made_before + 10:
                goes_on.set()
    assert [job.branches[0].completion.tokens for job in jobs] == [generate_plain(tiny, each.tokens, 100).tokens for each in requests]
    assert jobs[1].branches[0].completion.preemptions == 1
    engine.close()


@pytest.mark.parametrize(("length", "tokens", "blocks"), [(20, 60, 40), (9, 120, 50)])
def test_who_comes_back_has_its_time_slice(tiny: LoadedModel, length: int, tokens: int, blocks: int) -> None:
    engine = Engine(tiny, small_store(tiny, blocks=blocks), CHUNKED)
    jobs = [engine.add(Request(prompt(length, seed=seed), tokens), lambda _: None) for seed in range(12)]
    stops: dict[int, list[int]] = {index: [] for index in range(len(jobs))}  # of each, how many tokens it had made when it was stopped
    with engine.at_work():
        while engine.step():
            for job, mine in zip(jobs, stops.values(), strict=True):
                branch = job.branches[0]
                if branch.completion.preemptions > len(mine):
                    mine.append(len(branch.made))
    assert any(stops.values())
    for mine in stops.values():
        assert all(later - earlier >= SLICE_TOKENS for earlier, later in itertools.pairwise(mine))
    engine.close()
