"""The engine under load, over a real daemon: nobody starves, nothing leaks, and workers of one arena leave each other their guarantees."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvstore.clients.blocks import Prompt, Slots, Tokens
from kvstore.clients.client import KVClient
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.engine import Engine, Options
from kvstore.worker.model import LoadedModel
from kvstore.worker.opening import Portion, open_shared
from kvstore.worker.requests import Ended, Event, Finish, Made, Request, Sampling, Started
from kvstore.worker.scheduler import Rules
from kvstore.worker.serving import EngineThread
from tests.worker.stores import BLOCK_TOKENS, Watched, prompt, small_store

WAIT_S = 120.0  # seconds: far beyond what anything here takes
SETTLE_S = 20.0  # seconds for what was given back to have reached the daemon
AGE_S = 0.1  # seconds worth a level of priority in these tests
ARENA = "2MiB"
SEQUENCE_BLOCKS = 12  # of a request of the two workers: three of its prompt, the rest of its answer
PATIENCE_S = 60.0  # seconds that a sequence waits for what the other worker holds


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(dram=ARENA, nvme=False) as made:
        yield made


@dataclass
class Heard:
    """When what happened to a request. Seconds of one clock."""

    asked_at: float = 0.0
    started_at: float = 0.0
    first_at: float = 0.0
    ended_at: float = 0.0
    finish: Finish | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case Started(_, queued_s):
                self.asked_at, self.started_at = now - queued_s, now
            case Made() if not self.first_at:
                self.first_at = now
            case Ended(_, finish):
                self.finish, self.ended_at = finish, now
                self.over.set()


class Timed(Watched):
    """A store whose longest acquire is known."""

    longest_acquire_s: float = 0.0

    def acquire(self, lease: int, hashes: bytes, timeout_s: float, prompt: Prompt | None = None) -> Slots:
        began_at = time.monotonic()
        slots = super().acquire(lease, hashes, timeout_s, prompt)
        self.longest_acquire_s = max(self.longest_acquire_s, time.monotonic() - began_at)
        return slots


class Jealous(Watched):
    """A store that notes, each time that it gets fewer slots than it asked for, how much its session held then.

    One call at a time, so that nothing is given back between the refusal and the look at what is held.
    """

    def __init__(self, daemon: DaemonProcess, loaded: LoadedModel, name: str, portion: Portion) -> None:
        super().__init__(open_shared(loaded, daemon.address, name, portion))
        self.name, self.held_when_refused = name, list[int]()
        self.refused = threading.Event()
        self._client = KVClient(daemon.address)
        self._one = threading.RLock()

    def acquire(self, lease: int, hashes: bytes, timeout_s: float, prompt: Prompt | None = None) -> Slots:
        with self._one:
            return super().acquire(lease, hashes, timeout_s, prompt)

    def reserve(self, count: int) -> Slots:
        with self._one:
            slots = super().reserve(count)
            if len(slots) < count:
                self.held_when_refused.append(next(each.held_bytes for each in self._client.stats().sessions if each.client == self.name))
                self.refused.set()
            return slots

    def commit(self, lease: int, slots: Slots, hashes: bytes, parent: bytes, tokens: Tokens | None = None) -> None:
        with self._one:
            super().commit(lease, slots, hashes, parent, tokens)

    def abandon(self, slots: Slots) -> None:
        with self._one:
            super().abandon(slots)

    def release(self, lease: int, keep_blocks: int = 0) -> None:
        with self._one:
            super().release(lease, keep_blocks)

    def close(self) -> None:
        super().close()
        self._client.close()


def held(daemon: DaemonProcess) -> list[tuple[int, int, int]]:
    """What the sessions that are attached hold in the end: bytes, leases, slots to fill. What is given back is told without waiting."""
    until = time.monotonic() + SETTLE_S
    with KVClient(daemon.address) as client:
        while True:
            sessions: Sequence[pb.SessionStats] = [each for each in client.stats().sessions if not each.ended]
            found = [(each.held_bytes, each.leases, each.reserved_slots) for each in sessions]
            if not any(map(any, found)) or time.monotonic() > until:
                return found
            time.sleep(0.02)


def rest(serving: EngineThread, store: Watched) -> None:
    """Until the engine has given back what it had ahead, and the store has answered everything."""
    idle = threading.Event()

    def look(engine: Engine) -> None:
        assert not engine.step()
        idle.set()

    serving.ask(look)
    assert idle.wait(WAIT_S)
    assert store.flush(WAIT_S)


def test_nobody_starves_and_nothing_is_left_held(tiny: LoadedModel, daemon: DaemonProcess) -> None:
    """A request is let in at the latest when as many have been as came up to `age_s` after it, but for its own pull, and the end of
    one that it may have to wait for. Most here share a hot prefix, which would let them pass the others for ever."""
    store = Timed(open_shared(tiny, daemon.address, "load", Portion(block_tokens=BLOCK_TOKENS)))
    serving = EngineThread(Engine(tiny, store, Options(Rules(step_tokens=48, running=2, age_s=AGE_S), PATIENCE_S, keep_logits=False)))
    pauses_s = np.random.default_rng(3).exponential(0.01, 40)
    heard = [Heard() for _ in pauses_s]
    for index, pause_s in enumerate(pauses_s.tolist()):
        time.sleep(pause_s)
        tokens = prompt(64, seed=100 + index) if index % 5 == 3 else prompt(48) + prompt(16, seed=1 + index)
        serving.submit(Request(tokens, 12), heard[index])
    assert all(each.over.wait(WAIT_S) for each in heard)
    assert {each.finish for each in heard} == {Finish.LENGTH}
    starts = sorted(each.started_at for each in heard)
    own_s = 2 * store.longest_acquire_s + max(each.first_at - each.started_at for each in heard)
    seat_s = max(each.ended_at - each.started_at for each in heard)
    for each in heard:
        in_order = starts[sum(other.asked_at <= each.asked_at + AGE_S for other in heard) - 1]
        assert each.started_at <= in_order + own_s + seat_s
    rest(serving, store)
    assert held(daemon) == [(0, 0, 0)]
    assert serving.figures()["held_blocks"] == 0
    serving.close()
    store.close()


def test_no_worker_starves_another_below_its_guarantee(tiny: LoadedModel, daemon: DaemonProcess) -> None:
    """Two workers, each with more to do at once than the whole arena holds. The second one begins when the first has all it can get."""
    slot_bytes = tiny.geometry(BLOCK_TOKENS).slot_bytes
    with KVClient(daemon.address) as client:
        capacity = next(tier.capacity_bytes for tier in client.stats().tiers if tier.tier == "dram") // slot_bytes
    portion = Portion(capacity * 2 // 5 * slot_bytes, block_tokens=BLOCK_TOKENS)
    count = -(-capacity * 5 // 4 // SEQUENCE_BLOCKS)
    options = Options(Rules(step_tokens=128), PATIENCE_S, keep_logits=False)
    stores = [Jealous(daemon, tiny, name, portion) for name in ("first", "second")]
    workers = [(store, EngineThread(Engine(tiny, store, options)), [Heard() for _ in range(count)]) for store in stores]
    for number, (store, serving, heard) in enumerate(workers):
        for index, each in enumerate(heard):
            tokens = prompt(3 * BLOCK_TOKENS, seed=1000 * (number + 1) + index)
            serving.submit(Request(tokens, (SEQUENCE_BLOCKS - 3) * BLOCK_TOKENS), each)
        assert store.refused.wait(WAIT_S), "the arena was never full"
    for store, serving, heard in workers:
        assert all(each.over.wait(WAIT_S) for each in heard)
        assert {each.finish for each in heard} == {Finish.LENGTH}
        assert all(bytes_held + slot_bytes > portion.guarantee_bytes for bytes_held in store.held_when_refused)
        rest(serving, store)
    assert held(daemon) == [(0, 0, 0)] * 2
    for store, serving, _ in workers:
        serving.close()
        store.close()


def test_samples_of_one_prompt_hold_little_more_than_the_prompt(smol: LoadedModel) -> None:
    """Eight samples of 16 tokens from 1,000: the blocks of the prompt, and for each sample a copy of its last one and one more."""
    tokens = smol.encode("The store keeps what has been computed, block by block. " * 120)[:1000]
    assert len(tokens) == 1000
    geometry = smol.geometry()
    store = small_store(smol, 96, geometry.block_tokens)
    engine = Engine(smol, store, Options(Rules(step_tokens=512), keep_logits=False))
    made: dict[int, int] = dict.fromkeys(range(8), 0)

    def listen(event: Event) -> None:
        if isinstance(event, Made):
            made[event.branch] += 1

    engine.add(Request(tokens, 16, n=8, sampling=Sampling(temperature=1.0, seed=1), ignore_eos=True), listen)
    held_blocks = []
    with engine.at_work():
        while engine.step():
            held_blocks.append(int(engine.figures()["held_blocks"]))
    assert made == dict.fromkeys(range(8), 16)
    assert max(held_blocks) <= -(-1000 // 16) + 8 * 2
    assert max(held_blocks) > -(-1000 // 16), "the samples never parted"
    assert store.held_bytes == 0
    engine.close()
