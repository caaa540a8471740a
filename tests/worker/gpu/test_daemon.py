"""Workers on GPUs over a real daemon, whose GPUs and theirs are the same memory: sharing, blocks that went down and come up, its death."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvstore.clients.blocks import Prompt
from kvstore.clients.client import KVClient
from kvstore.errors import Unavailable
from kvstore.hashing import block_hashes, fingerprint
from kvstore.testing.fake_gpu_daemon import COPY_FAILED, GpuDaemon
from kvstore.worker.engine import Engine, Options
from kvstore.worker.gpu.opening import open_in_pool
from kvstore.worker.gpu.store import Lifted
from kvstore.worker.opening import Portion
from kvstore.worker.requests import Finish, Request
from tests.worker.gpu.check import POOL_BYTES, WAIT_S, blocks_in, wait_until
from tests.worker.gpu.child import FLUSH_S
from tests.worker.gpu.fake import FakeGpu
from tests.worker.gpu.models import load
from tests.worker.kinds import expected
from tests.worker.stores import BLOCK_TOKENS, Watched, prompt

MODEL = "gpu-llama"


@pytest.fixture(scope="module")
def daemon() -> Iterator[GpuDaemon]:
    """One with a pool of 128 blocks."""
    with GpuDaemon(hbm=POOL_BYTES, nvme=False) as made:
        yield made


class Worker:
    """A worker in this process."""

    def __init__(self, daemon: GpuDaemon, gpu: FakeGpu) -> None:
        self.loaded, self.gpu = load(MODEL), gpu
        self.store = open_in_pool(self.loaded, gpu, daemon.address, "worker", Portion(block_tokens=BLOCK_TOKENS))
        self.watched = Watched(self.store)
        self.engine = Engine(self.loaded, self.watched, Options(gpu=gpu))

    def make(self, tokens: list[int], count: int) -> tuple[int, str]:
        """Generate and compare with transformers; tokens that were hits, and the store's fault."""
        done = self.engine.generate([Request(tokens, count)])[0]
        assert (done.tokens, done.finish) == (expected(self.loaded, tokens, count), Finish.LENGTH)
        return done.hit_tokens, done.store_fault

    def close(self) -> None:
        self.engine.close()
        self.store.close()


@pytest.fixture
def worker(daemon: GpuDaemon, gpu: FakeGpu) -> Iterator[Worker]:
    made = Worker(daemon, gpu)
    yield made
    made.close()
    assert [left for left in gpu.driver.leaks() if "stream" not in left and "event" not in left] == []


def test_a_hit_in_the_pool_moves_no_byte(daemon: GpuDaemon, worker: Worker) -> None:
    """Two drivers that map the same memory; `tests.kernels.test_gpu_script` has two processes."""
    gpu = FakeGpu()
    other, tokens = Worker(daemon, gpu), prompt(60, seed=1)
    assert worker.make(tokens, 12) == (0, "")
    assert worker.watched.flush(FLUSH_S)
    assert other.make(tokens, 12) == (56, "")
    assert (other.store.lifted_blocks, gpu.driver.calls["copy"], gpu.driver.calls["launch"], gpu.driver.violations) == (0, 0, 0, [])
    assert gpu.replays > 10
    other.close()
    gpu.close()


def driven_out(daemon: GpuDaemon, worker: Worker, seed: int) -> list[int]:
    """A prompt of 61 tokens whose 7 blocks are in dram, and were displaced in the pool by others'."""
    tokens = prompt(61, seed=seed)
    for each in (tokens, *(prompt(65, seed=1000 * seed + at) for at in range(17))):  # 8 blocks each
        before, blocks = blocks_in(daemon)["dram"], len(each) // BLOCK_TOKENS
        worker.engine.generate([Request(each, 1)])
        assert worker.watched.flush(FLUSH_S)
        wait_until(lambda before=before, blocks=blocks: blocks_in(daemon)["dram"] >= before + blocks)  # type: ignore[misc]
    return tokens


@pytest.mark.parametrize("by_kernel", [True, False])
def test_blocks_that_left_the_pool_are_brought_up_once(
    daemon: GpuDaemon, worker: Worker, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_kernel:
        monkeypatch.setattr(worker.gpu, "copier", lambda *_: None)
    tokens, calls = driven_out(daemon, worker, 12 + by_kernel), worker.gpu.driver.calls
    lifted = worker.store.lifted_blocks
    assert worker.make(tokens, 12) == (56, "")
    assert worker.watched.flush(FLUSH_S)
    assert worker.store.lifted_blocks == lifted + 7
    assert (calls["launch"], calls["copy"], worker.gpu.backend.aside.launches) == ((2, 0, 2) if by_kernel else (0, 14, 0))
    assert worker.make(tokens, 12) == (56, "")
    assert calls["launch"] + calls["copy"] == (2 if by_kernel else 14), "they are in the pool again"
    assert worker.store.failed_lifts == 0


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What has arrived is published only once this is set."""
    let_go, wait = threading.Event(), Lifted.wait
    monkeypatch.setattr(Lifted, "wait", lambda lifted: (let_go.wait(WAIT_S), wait(lifted))[1])
    yield let_go
    let_go.set()


def test_a_layer_is_computed_while_later_ones_are_on_their_way(
    daemon: GpuDaemon, worker: Worker, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, driver = driven_out(daemon, worker, 3), worker.gpu.driver
    arrived, on_their_way = worker.gpu.arrived, []

    def watched(follow: Callable[[int], None]) -> None:
        arrived(follow)
        on_their_way.append(driver.in_flight())

    monkeypatch.setattr(worker.gpu, "arrived", watched)
    assert worker.make(tokens, 6) == (56, "")
    assert on_their_way[:2] == [7, 0]
    held.set()


def test_compute_that_follows_nothing_reads_what_is_no_number(
    daemon: GpuDaemon, worker: Worker, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the order is watched at all."""
    tokens = driven_out(daemon, worker, 4)
    monkeypatch.setattr(worker.gpu, "arrived", lambda _follow: None)
    monkeypatch.setattr(worker.gpu, "settle", lambda: None)
    assert worker.engine.generate([Request(tokens, 6)])[0].tokens != expected(worker.loaded, tokens, 6)
    held.set()


def test_copies_that_fail_change_no_answer(daemon: GpuDaemon, worker: Worker) -> None:
    tokens = driven_out(daemon, worker, 5)
    worker.gpu.driver.fail("launch", COPY_FAILED, after=1)
    worker.make(tokens, 6)
    assert worker.store.failed_lifts == 1


def test_what_is_lost_on_its_way_is_never_published(daemon: GpuDaemon, worker: Worker) -> None:
    tokens = driven_out(daemon, worker, 6)
    root, store = fingerprint(worker.loaded.identity), worker.store
    hashes = block_hashes(root, tokens, BLOCK_TOKENS)
    worker.gpu.driver.fail("wait", COPY_FAILED)
    slots = store.acquire(10**6, hashes, 5.0, Prompt(tokens, root))
    assert len(slots) == 7
    assert store.flush(FLUSH_S)
    assert slots.arrival is not None
    with pytest.raises(Unavailable, match="did not arrive"):
        slots.arrival.follow(0, worker.gpu.stream())
    store.release(10**6)
    assert len(store.acquire(10**6, hashes, 5.0)) == 0
    store.release(10**6)


def test_blocks_whose_request_is_gone_are_published_all_the_same(daemon: GpuDaemon, worker: Worker, held: threading.Event) -> None:
    tokens = driven_out(daemon, worker, 7)
    root, store = fingerprint(worker.loaded.identity), worker.store
    hashes = block_hashes(root, tokens, BLOCK_TOKENS)
    assert store.acquire(10**6, hashes, 5.0, Prompt(tokens, root)).arrival is not None
    store.release(10**6)
    held.set()
    assert store.flush(FLUSH_S)
    assert worker.make(tokens, 6) == (56, "")
    assert store.lifted_blocks == 7
    worker.engine.close()
    with KVClient(daemon.address) as client:
        wait_until(lambda: all(session.held_bytes == session.reserved_slots == 0 for session in client.stats().sessions))


def scribble(daemon: GpuDaemon) -> None:
    """Take every slot of the daemon's pool, write over it, and give it back."""
    loaded, gpu = load(MODEL), FakeGpu()
    store = open_in_pool(loaded, gpu, daemon.address, "other", Portion(block_tokens=BLOCK_TOKENS))
    slots = store.reserve(1 << 20)
    assert len(slots)
    store.arena.fill_(0x41)
    store.abandon(slots)
    store.close()
    gpu.close()


def test_a_daemon_killed_in_the_middle_changes_no_answer_and_is_used_again(daemon: GpuDaemon, worker: Worker) -> None:
    tokens = prompt(60, seed=8)
    worker.make(tokens, 3)
    recorded = worker.gpu.captures
    strikes: list[object] = []

    def strike(*_: object) -> None:
        if not strikes and len(worker.watched.committed) == 10:
            strikes.append(daemon.restart())
            scribble(daemon)

    worker.watched.on_commit = strike
    assert worker.make(tokens, 80)[0] == 56
    assert strikes
    wait_until(lambda: worker.make(tokens, 12) == (56, ""))
    assert worker.make(tokens, 12) == (56, "")
    assert worker.gpu.captures > recorded, "graphs of the memory that went were recorded anew"
    assert sum("map of" in left for left in worker.gpu.driver.leaks()) == 1, "the earlier daemon's memory was not given back"


@pytest.mark.parametrize("ends", ["the daemon", "the session"])
def test_memory_that_goes_with_the_daemon_is_left_at_once_and_the_answer_computed_again(gpu: FakeGpu, ends: str) -> None:
    """Where a pool cannot be shared as a descriptor. With the session it goes too: only its stream tells of the daemon's end."""
    with GpuDaemon(hbm=POOL_BYTES, nvme=False, descriptors=False) as daemon:
        worker = Worker(daemon, gpu)
        strikes: list[object] = []
        pool = worker.store._mapping.imported
        assert not pool.outlives_owner

        def strike(*_: object) -> None:
            if not strikes and len(worker.watched.committed) == 6:
                strikes.append(daemon.restart() if ends == "the daemon" else worker.store._session._live[0]._stream.cancel())
                wait_until(lambda: not pool.is_open)

        worker.watched.on_commit = strike
        tokens = prompt(30, seed=9)
        done = worker.engine.generate_all([Request(tokens, 60, n=2)])[0]
        assert [each.tokens for each in done] == [expected(worker.loaded, tokens, 60)] * 2
        assert strikes
        assert sum(each.preemptions for each in done)
        wait_until(lambda: worker.make(tokens, 12)[0] >= 24)
        worker.close()
