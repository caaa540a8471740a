"""One batch of each kind of model meets everything at once, over a real daemon: chunks beside strangers, forks, too little memory, another
worker, a daemon that is killed in the middle, the disk.

Compared with transformers' own generate, in fp32, token for token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstore.clients.client import KVClient
from kvstore.hashing import usable_blocks
from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.engine import Engine, Options
from kvstore.worker.model import LoadedModel
from kvstore.worker.requests import Request
from kvstore.worker.scheduler import Rules
from tests.cases.figures import settled
from tests.worker import kinds
from tests.worker.stores import BLOCK_TOKENS, Watched, prompt

TRIES, PAUSE_S = 200, 0.05  # tries, and seconds between them: a daemon is back within a second or two
LENGTH, TOKENS, TEXTS = 60, 20, 3
LEFT_BLOCKS = 24  # blocks that there is room for: two texts need more at their end
WAIT_S = 60.0  # seconds: far beyond what anything here takes
OPTIONS = Options(Rules(step_tokens=24), patience_s=WAIT_S, keep_logits=False)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(dram="2MiB", nvme_bytes="32MiB") as process:
        yield process


@pytest.fixture(autouse=True)
def _loads_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models compute a block sooner than a busy disk has it."""
    monkeypatch.setattr("kvstore.worker.costs.FLOOR_S", 10.0)


def opened(loaded: LoadedModel, daemon: DaemonProcess) -> Watched:
    """A session of its own."""
    with KVClient(daemon.address) as client:
        return Watched(client.open_blocks(loaded.identity, loaded.geometry(BLOCK_TOKENS)))


def made(engine: Engine, requests: list[Request]) -> list[list[list[int]]]:
    """Of each request the tokens of each sample."""
    return [[each.tokens for each in branches] for branches in engine.generate_all(requests)]


def run_until(engine: Engine, requests: list[Request], expected: list[list[list[int]]], figures: tuple[str, ...]) -> None:
    """Once, but where the machine stood still for so long that the daemon was taken for ill, and the store left alone for a while."""
    for _ in range(TRIES):
        assert made(engine, requests) == expected
        if all(engine.figures().get(name, 0) > 0 for name in figures):
            return
        time.sleep(PAUSE_S)
    raise AssertionError(f"nothing happened that counts in {figures}: {engine.figures()}")


class Strike:
    """Kills the daemon with the first commit, and starts it again."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon, self.struck = daemon, False

    def __call__(self, *_: object) -> None:
        if not self.struck:
            self.struck = True
            self._daemon.restart()


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_whatever_happens_to_a_batch_its_tokens_are_those_of_transformers(kind: str, daemon: DaemonProcess) -> None:
    loaded = kinds.load(kind)
    requests = [Request(prompt(LENGTH + seed, seed=seed), TOKENS, n=2 if seed == 1 else 1) for seed in range(TEXTS)]
    expected = [[kinds.expected(loaded, request.tokens, TOKENS)] * request.n for request in requests]
    with (
        closing(opened(loaded, daemon)) as other,
        closing(opened(loaded, daemon)) as store,
        closing(Engine(loaded, store, OPTIONS)) as engine,
    ):
        assert len(other.reserve((2 << 20) // other.geometry.slot_bytes - LEFT_BLOCKS)), "another worker holds most of the memory"
        run_until(engine, requests, expected, ("preemptions_total", "resumed_hit_tokens_total"))
        assert store.flush(WAIT_S)
    with closing(opened(loaded, daemon)) as store, closing(Engine(loaded, store, OPTIONS)) as engine:
        run_until(engine, requests, expected, ("hit_tokens_total",))
        assert store.flush(WAIT_S)
        with KVClient(daemon.address) as client:
            assert settled(client)
        strike = store.on_commit = Strike(daemon)
        for seed in range(9, 9 + TRIES):
            new = Request(prompt(LENGTH, seed=seed), TOKENS)
            assert made(engine, [new, *requests]) == [[kinds.expected(loaded, new.tokens, TOKENS)], *expected]
            if strike.struck:
                break
        assert strike.struck
        _from_the_disk(engine, requests[0], expected[0][0])


def _from_the_disk(engine: Engine, request: Request, expected: list[int]) -> None:
    """All of it: the daemon that came back had nothing in memory."""
    for _ in range(TRIES):
        done = engine.generate([request])[0]
        assert done.tokens == expected
        if done.hit_tokens == usable_blocks(LENGTH, BLOCK_TOKENS) * BLOCK_TOKENS and not done.store_fault:
            return
        time.sleep(PAUSE_S)
    raise AssertionError("the daemon that came back is not used")
