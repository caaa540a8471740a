"""Leases for a scheduler: asked for and polled, never waited for, whatever the daemon does."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvstore.clients import requests
from kvstore.clients.channel import target
from kvstore.clients.client import KVClient
from kvstore.clients.prefixes import Prefixes, PrefixLease
from kvstore.clients.requests import KEEP_ALL
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, right
from tests.cases.figures import eventually, nothing_held, store, tier

SHARDS = ("tp0/2", "tp1/2")
BLOCKS = 20
PROMPT = chain(1, BLOCKS)
QUICK_S = 1.0  # seconds that a call may keep its caller, on a machine that does other things too: half of what it may wait for


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path, dram="16MiB") as process:
        yield process


@contextmanager
def opened(daemon: DaemonProcess) -> Iterator[Prefixes]:
    members = [requests.open_namespace(IDENTITY, GEOMETRY, shard, "", KEEP_ALL) for shard in SHARDS]
    with closing(Prefixes(target(daemon.address), members, "test")) as prefixes:
        yield prefixes


def begun(prefixes: Prefixes, timeout_s: float = 2.0) -> PrefixLease:
    """A lease asked for, once there is a session."""
    found: list[PrefixLease] = []

    def ask() -> bool:
        began_at = time.monotonic()
        lease = prefixes.begin(PROMPT, timeout_s)
        assert time.monotonic() - began_at < QUICK_S
        found.extend([lease] if lease else [])
        return bool(found)

    assert eventually(ask)
    return found[0]


def stored(daemon: DaemonProcess, first: int = BLOCKS, second: int = BLOCKS) -> None:
    with KVClient(daemon.address) as client:
        for shard, blocks in zip(SHARDS, (first, second), strict=True):
            store(client, client.open_namespace(IDENTITY, GEOMETRY, shard), PROMPT[: 32 * blocks])


def test_every_member_is_granted_what_the_poorest_has(daemon: DaemonProcess) -> None:
    stored(daemon, BLOCKS, BLOCKS - 7)
    with opened(daemon) as prefixes:
        lease = begun(prefixes)
        assert eventually(lease.poll)
        assert [len(units) for units in lease.units] == [BLOCKS - 7] * 2
        for units in lease.units:
            assert right([lease.arena.view(unit, GEOMETRY.block_bytes) for unit in units], PROMPT)
        lease.release()
        lease.release()
        assert lease.blocks == 0
        with KVClient(daemon.address) as client:
            assert eventually(lambda: tier(client, "dram").held_bytes == 0)


def test_a_daemon_that_is_stopped_costs_one_deadline(daemon: DaemonProcess) -> None:
    """The lease is decided at its deadline with nothing, and for a while nobody asks again."""
    stored(daemon)
    with opened(daemon) as prefixes:
        begun(prefixes).release()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            lease = begun(prefixes)
            began_at = time.monotonic()
            assert eventually(lease.poll)
            assert time.monotonic() - began_at < 6
            assert lease.blocks == 0
            assert prefixes.begin(PROMPT, 0.2) is None
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        again = begun(prefixes)
        assert eventually(again.poll)
        assert again.blocks == BLOCKS


def test_a_daemon_that_is_restarted_is_found_again(daemon: DaemonProcess) -> None:
    """A lease from before keeps its bytes; the next one is the new daemon's."""
    stored(daemon)
    with opened(daemon) as prefixes:
        old = begun(prefixes)
        assert eventually(old.poll)
        view = old.arena.view(old.units[0][0], GEOMETRY.block_bytes)
        daemon.restart()
        new = begun(prefixes)
        assert eventually(new.poll)
        assert right([view], PROMPT)
        old.release()
        assert new.blocks == BLOCKS or new.blocks == 0  # what was on the disk by then


def test_a_lease_that_is_given_back_before_its_answer_holds_nothing(daemon: DaemonProcess) -> None:
    stored(daemon)
    with opened(daemon) as prefixes, KVClient(daemon.address) as client:
        for _ in range(50):
            begun(prefixes).release()
        assert nothing_held(client)
        assert eventually(lambda: all(session.leases == 0 for session in client.stats().sessions))
