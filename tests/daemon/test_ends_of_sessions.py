"""What the end of a client's process, stream or patience means for what it held: real processes, killed and stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, pattern
from tests.cases import figures
from tests.daemon.puppet import Puppet

SLOT = GEOMETRY.slot_bytes


SOON_S = 3.0  # seconds: within one what a dead process held is free, on a machine that does nothing else


def eventually(check: Callable[[], bool], within_s: float = SOON_S) -> float:
    """Seconds until the check held. Fails where it did not."""
    started_at = time.monotonic()
    assert figures.eventually(check, within_s), f"not within {within_s} s"
    return time.monotonic() - started_at


def classes(client: KVClient) -> dict[str, int]:
    return dict(next(tier for tier in client.stats().tiers if tier.tier == "dram").class_bytes)


def held_bytes(client: KVClient) -> int:
    return next(tier.held_bytes for tier in client.stats().tiers if tier.tier == "dram")


def test_a_killed_writers_keys_are_free_at_once_and_its_slots_within_a_second(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client, Puppet(daemon.address) as puppet:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        assert puppet.tell("reserve", 1, 3) == ["slot"] * 3
        with client.put(namespace, chain(1, 3)) as put:
            assert put.names == ("in_flight",) * 3, "until then a second writer is told"
        assert classes(client)["reserved"] == 3 * SLOT
        puppet.kill()
        eventually(lambda: held_bytes(client) == 0)
        with client.put(namespace, chain(1, 3)) as put:
            for block in put.blocks:
                block.write(pattern(block.hash))
        assert put.stored == 3


def test_a_killed_readers_leases_are_free_within_a_second(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client, Puppet(daemon.address) as puppet:
        assert puppet.tell("put", 2, 4) == 4
        assert puppet.tell("hold", 2, 4) == 4
        assert held_bytes(client) == 4 * SLOT
        puppet.kill()
        eventually(lambda: held_bytes(client) == 0)
        assert client.lookup(client.open_namespace(IDENTITY, GEOMETRY), chain(2, 4)).blocks == 4, "its blocks stay"


def test_a_killed_client_does_not_disturb_the_others(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        for seed in range(3):
            with Puppet(daemon.address) as puppet:
                puppet.tell("reserve", 10 + seed, 50)
                puppet.kill()
                with client.put(namespace, chain(20 + seed, 4)) as put:
                    for block in put.blocks:
                        block.write(pattern(block.hash))
                assert put.stored == 4
        eventually(lambda: held_bytes(client) == 0)


def test_a_forked_child_does_not_keep_a_dead_parents_slots(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client, Puppet(daemon.address) as puppet:
        puppet.tell("reserve", 3, 2)
        child = puppet.tell("fork")
        try:
            puppet.kill()
            # The child has the parent's sockets too: the stream ends by silence, or here when the child goes.
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
        eventually(lambda: held_bytes(client) == 0)


def test_a_stopped_client_is_ended_by_silence_and_keeps_its_memory_until_it_dies(tmp_path: Path) -> None:
    flags = ["--session-silence-s", "3"]
    with DaemonProcess(tmp_path, flags) as daemon, KVClient(daemon.address) as client, Puppet(daemon.address) as puppet:
        puppet.tell("put", 4, 2)
        puppet.tell("hold", 4, 2)
        puppet.tell("reserve", 5, 2)
        puppet.send(signal.SIGSTOP)
        took_s = eventually(lambda: classes(client)["orphaned"] == 2 * SLOT, 20.0)
        assert took_s > 1.0, "it was ended by silence, not by chance"
        assert held_bytes(client) == 4 * SLOT, "its process may still touch them"
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        with client.get(namespace, chain(4, 2)) as lease:
            assert lease.blocks == 2, "others can still lease the block in an orphaned lease"
        with client.put(namespace, chain(5, 2)) as put:
            assert put.names == ("slot",) * 2, "the keys of its reservations are free"
        puppet.send(signal.SIGCONT)
        eventually(lambda: puppet.tell("check") == "SessionEnded", 10.0)
        assert puppet.tell("peek"), "what it had leased is still what it was"
        puppet.tell("drop")
        eventually(lambda: held_bytes(client) == 0)


def test_a_session_without_traffic_lives_on(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, ["--session-silence-s", "3"]) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        with client.put(namespace, chain(6, 1)) as put:
            put.blocks[0].write(pattern(put.blocks[0].hash))
        with client.get(namespace, chain(6, 1)) as lease:
            time.sleep(7.0)
            assert lease.blocks == 1
            lease.check()


def test_lookups_lease_nothing(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client, Puppet(daemon.address) as puppet:
        puppet.tell("put", 7, 3)
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        for _ in range(1000):
            client.lookup(namespace, chain(7, 3))
        assert held_bytes(client) == 0


def test_a_cleared_block_stays_with_whoever_reads_it(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client, Puppet(daemon.address) as puppet:
        puppet.tell("put", 8, 3)
        puppet.tell("hold", 8, 3)
        cleared = client.clear()
        assert (cleared.blocks, cleared.held_blocks) == (3, 3)
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        for seed in range(9, 12):
            with client.put(namespace, chain(seed, 200)) as put:
                for block in put.blocks:
                    block.write(pattern(block.hash))
        assert puppet.tell("peek")
        puppet.tell("drop")
        eventually(lambda: classes(client)["doomed"] == 0)


@pytest.mark.parametrize("orderly", [True, False])
def test_a_client_that_closes_leaves_nothing_behind(daemon: DaemonProcess, orderly: bool) -> None:
    with KVClient(daemon.address) as watcher:
        client = KVClient(daemon.address)
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        with client.put(namespace, chain(12, 2)) as put:
            if not orderly:
                client.close()
            for block in put.blocks:
                block.filled = False
        client.close()
        eventually(lambda: held_bytes(watcher) == 0)
        eventually(lambda: all(not session.ended for session in watcher.stats().sessions))
