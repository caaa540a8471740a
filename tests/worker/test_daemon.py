"""The worker over a real daemon: sharing between sessions, and going on when the daemon is killed under a running sequence."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.cli.demo_processes import Daemon, Places, places
from kvstore.clients.blocks import Slots
from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.engine import Engine
from kvstore.worker.model import LoadedModel
from kvstore.worker.plain import generate_plain
from kvstore.worker.requests import Finish, Request
from tests.worker.stores import BLOCK_TOKENS, Watched, prompt

REACH_TRIES, REACH_PAUSE_S = 200, 0.05  # tries, and seconds between them: a daemon is back within a second or two


@pytest.fixture
def where() -> Iterator[Places]:
    with places() as made:
        yield made


@pytest.fixture
def daemon(where: Places) -> Iterator[Daemon]:
    with Daemon(where) as made:
        yield made


def opened(loaded: LoadedModel, where: Places) -> Watched:
    """A session of its own."""
    with KVClient(str(where.socket)) as client:
        return Watched(client.open_blocks(loaded.identity, loaded.geometry(BLOCK_TOKENS)))


def noise_everywhere(store: Watched) -> None:
    """Take every slot that the daemon gives, scribble over it, and give it back."""
    taken: list[Slots] = []
    while len(slots := store.reserve(8192)):
        taken.append(slots)
        for unit in slots.units.tolist():
            store.arena[unit * 4096 :][: store.geometry.slot_bytes] = 0x41
    assert taken
    for slots in taken:
        store.abandon(slots)


@pytest.mark.usefixtures("daemon")
def test_one_session_computes_and_another_hits(tiny: LoadedModel, where: Places) -> None:
    tokens = prompt(100)
    plain = generate_plain(tiny, tokens, 20).tokens
    hits = []
    for _ in range(2):
        store = opened(tiny, where)
        engine = Engine(tiny, store)
        done = engine.generate([Request(tokens, 20)])[0]
        assert (done.tokens, done.store_fault) == (plain, "")
        hits.append(done.hit_tokens)
        assert store.flush(10)
        engine.close()
        store.close()
    assert hits == [0, 96]


@pytest.mark.usefixtures("daemon")
def test_nothing_is_held_after_the_answers(tiny: LoadedModel, where: Places) -> None:
    store = opened(tiny, where)
    engine = Engine(tiny, store)
    engine.generate([Request(prompt(length), 30) for length in (9, 40, 41)])
    engine.close()
    assert store.flush(10)
    with KVClient(str(where.socket)) as client:
        mine = [session for session in client.stats().sessions if not session.ended]
        assert [(session.held_bytes, session.leases, session.reserved_slots) for session in mine] == [(0, 0, 0)]
    store.close()


def test_a_daemon_killed_in_the_middle_changes_no_answer(tiny: LoadedModel, where: Places, daemon: Daemon) -> None:
    tokens = prompt(100)
    store = opened(tiny, where)
    engine = Engine(tiny, store)
    engine.generate([Request(tokens, 1)])

    def strike(*_: object) -> None:
        if len(store.committed) == 4:
            daemon.kill_and_restart()
            other = opened(tiny, where)
            noise_everywhere(other)
            other.close()

    store.on_commit = strike
    done = engine.generate([Request(tokens, 300)])[0]
    assert len(store.committed) > 4
    assert (done.hit_tokens, done.finish) == (96, Finish.LENGTH)
    assert done.tokens == generate_plain(tiny, tokens, 300, split=96).tokens
    engine.close()
    store.close()


def assert_found_again(engine: Engine, loaded: LoadedModel, tokens: list[int]) -> None:
    """A prompt of 100 tokens, some time after the daemon came back; the answer is right all along."""
    plain = generate_plain(loaded, tokens, 20).tokens
    for _ in range(REACH_TRIES):
        done = engine.generate([Request(tokens, 20)])[0]
        assert done.tokens == plain
        if done.hit_tokens == 96:
            break
        time.sleep(REACH_PAUSE_S)
    assert (done.hit_tokens, done.store_fault) == (96, "")


def test_a_worker_uses_the_daemon_that_came_back(tiny: LoadedModel, where: Places, daemon: Daemon) -> None:
    tokens = prompt(100)
    store = opened(tiny, where)
    engine = Engine(tiny, store)
    engine.generate([Request(tokens, 1)])
    daemon.kill_and_restart()
    assert_found_again(engine, tiny, tokens)
    engine.close()
    store.close()


@pytest.mark.parametrize("dram", ["40MiB", "90MiB"])
def test_a_worker_uses_a_daemon_that_came_back_with_other_memory(
    tiny: LoadedModel, tmp_path: Path, dram: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    tokens = prompt(100)
    with DaemonProcess(tmp_path, dram="64MiB") as daemon, KVClient(daemon.address) as client:
        store = client.open_blocks(tiny.identity, tiny.geometry(BLOCK_TOKENS))
        engine = Engine(tiny, store)
        engine.generate([Request(tokens, 1)])
        assert store.flush(10)
        before = engine.figures()["room_blocks"]
        daemon.stop()
        assert engine.generate([Request(tokens, 1)])[0].store_fault
        daemon.flags[daemon.flags.index("--dram") + 1] = dram
        daemon.start()
        assert_found_again(engine, tiny, tokens)
        engine.generate([Request(tokens, 1)])
        assert (engine.figures()["room_blocks"] > before) == (dram == "90MiB")
        engine.close()
        store.close()
    said = [each for each in caplog.messages if "store" in each]
    assert any("goes on without the store" in each for each in said)
    assert said[-1] == "the store is used again"


def test_bytes_of_a_hit_from_disk_are_those_that_were_stored(tiny: LoadedModel, where: Places, daemon: Daemon) -> None:
    tokens = prompt(100)
    store = opened(tiny, where)
    written: list[bytes] = []
    store.on_commit = lambda slots, _: written.extend(store.block_bytes(unit) for unit in slots.units.tolist())
    engine = Engine(tiny, store)
    engine.generate([Request(tokens, 1)])
    assert store.flush(10)
    with KVClient(str(where.socket)) as client:
        for _ in range(REACH_TRIES):
            blocks = {tier.tier: tier.blocks for tier in client.stats().tiers}
            if blocks["nvme"] == blocks["dram"]:
                break
            time.sleep(REACH_PAUSE_S)
    engine.close()
    store.close()
    daemon.kill_and_restart()
    store = opened(tiny, where)
    engine = Engine(tiny, store)
    assert engine.generate([Request(tokens, 1)])[0].hit_tokens == 96
    found = [store.block_bytes(unit) for unit in np.concatenate([slots.units for slots in store.acquired]).tolist()]
    assert found == written[:12]
    engine.close()
    store.close()


def test_a_daemon_that_stands_still_is_waited_for_once_and_changes_no_answer(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops in the middle of an answer; those that come meanwhile, short and long ones, do not wait for it one by one."""
    monkeypatch.setattr("kvstore.clients.blocksession.RESERVE_S", 0.5)
    monkeypatch.setattr("kvstore.clients.blocksession.GRACE_S", 0.5)
    first = Request(prompt(100), 100)
    others = [Request(prompt(length, seed=length), 12) for length in (100, 5, 60, 7) * 6]
    with DaemonProcess(dram="8MiB", nvme=False) as daemon:
        with KVClient(daemon.address) as client:
            store = Watched(client.open_blocks(tiny.identity, tiny.geometry(BLOCK_TOKENS)))
        engine = Engine(tiny, store)
        engine.generate([first])
        assert store.flush(10)
        commits = len(store.committed)
        store.on_commit = lambda *_: os.kill(daemon.pid, signal.SIGSTOP) if len(store.committed) == commits + 3 else None
        try:
            began_at = time.monotonic()
            longer = Request([*first.tokens, *prompt(9, seed=7)], 100)
            done = [engine.generate([each])[0] for each in (longer, *others)]
            took_s = time.monotonic() - began_at
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert [each.tokens for each in done] == [generate_plain(tiny, each.tokens, each.max_tokens).tokens for each in (longer, *others)]
        assert (done[0].hit_tokens, done[-1].hit_tokens, done[-1].store_fault[:9]) == (96, 0, "daemon at")
        assert took_s < len(others) * 0.5, "each waited"
        for _ in range(REACH_TRIES):
            done = [engine.generate([first])[0]]
            if done[0].hit_tokens == 96:
                break
            time.sleep(REACH_PAUSE_S)
        assert (done[0].hit_tokens, done[0].store_fault) == (96, "")
        engine.close()
        store.close()
