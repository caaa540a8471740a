"""Clients that are killed, stopped, raced and late: whatever they still do or hold, nobody gets another's bytes, and they are told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import errors
from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain
from tests.cases.children import Child
from tests.cases.figures import eventually, nothing_held, read, store, tier

SLOT = GEOMETRY.slot_bytes
SILENCE_S = 3.0  # seconds that a session may be silent here: longer than a busy machine keeps a living process waiting
OVER = (errors.SessionEnded, errors.StaleEpoch)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[DaemonProcess]:
    """8 MiB of memory, no disk, little patience."""
    with DaemonProcess(tmp_path, ["--session-silence-s", str(SILENCE_S)], dram="8MiB", nvme=False) as process:
        yield process


@pytest.fixture
def client(small: DaemonProcess) -> Iterator[KVClient]:
    with KVClient(small.address) as made:
        yield made


def fill_memory(client: KVClient) -> list[int]:
    """Store far more than fits, and read all that is left of it: the last chains, each byte right."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    for seed in range(100, 135):
        store(client, namespace, chain(seed, 20))
    return [read(client, namespace, chain(seed, 20)) for seed in range(125, 135)]


def orphaned(client: KVClient) -> int:
    return tier(client, "dram").class_bytes["orphaned"]


def is_told(child: Child) -> bool:
    """Whether the child's use of its lease raises that it is over."""
    try:
        child.ask("right")
    except OVER:
        return True
    return False


def test_a_client_killed_in_the_middle_of_a_block_leaves_nothing_to_find(small: DaemonProcess, client: KVClient) -> None:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    for seed in range(5):
        with Child(small.address) as child:
            assert child.ask("reserve", seed, 8) == ["slot"] * 8
            child.kill()
        assert client.lookup(namespace, chain(seed, 8)).blocks == 0
        assert nothing_held(client, 3.0)
        assert store(client, namespace, chain(seed, 8)).names == ("stored",) * 8
        assert read(client, namespace, chain(seed, 8)) == 8


def test_a_reader_stopped_past_its_heartbeat_is_told_and_sees_its_own_bytes(small: DaemonProcess, client: KVClient) -> None:
    with Child(small.address) as child:
        child.ask("put", 1, 10)
        assert child.ask("hold", 1, 10) == 10
        child.stop()
        assert eventually(lambda: any(session.ended and session.leases for session in client.stats().sessions), 4 * SILENCE_S)
        assert fill_memory(client) == [20] * 10
        child.go_on()
        assert eventually(lambda: is_told(child), 4 * SILENCE_S)
        assert child.ask("peek")
        child.ask("let_go")
        assert nothing_held(client)
        assert child.ask("put", 2, 3) == ["stored"] * 3, "it goes on with a new session"


def test_a_reader_stopped_over_a_restart_is_told_and_sees_its_own_bytes(small: DaemonProcess, client: KVClient) -> None:
    with Child(small.address) as child:
        child.ask("put", 1, 10)
        assert child.ask("hold", 1, 10) == 10
        child.stop()
        small.restart()
        assert fill_memory(client) == [20] * 10
        child.go_on()
        assert eventually(lambda: is_told(child), 4 * SILENCE_S)
        assert child.ask("peek")
        assert fill_memory(client) == [20] * 10
        assert child.ask("peek")
        child.ask("let_go")
        assert nothing_held(client)


@pytest.mark.parametrize("restart", [False, True], ids=["silent", "restarted"])
def test_a_writer_whose_reservation_was_revoked_writes_into_nobodys_block(small: DaemonProcess, client: KVClient, restart: bool) -> None:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    with Child(small.address) as child:
        assert child.ask("reserve", 1, 10) == ["slot"] * 10
        child.stop()
        if restart:
            small.restart()
        assert eventually(lambda: orphaned(client) == 10 * SLOT, 4 * SILENCE_S)
        assert store(client, namespace, chain(1, 10)).names == ("stored",) * 10, "its keys are free"
        child.go_on()
        assert child.ask("scribble", 0xEE) == 10
        assert fill_memory(client) == [20] * 10
        assert child.ask("scribble", 0xDD) == 10
        assert fill_memory(client) == [20] * 10
        with pytest.raises(OVER):
            child.ask("commit")
        assert nothing_held(client)
        assert fill_memory(client) == [20] * 10


def test_two_survivors_of_one_block_keep_it_until_the_last_is_gone(small: DaemonProcess, client: KVClient) -> None:
    with Child(small.address) as one, Child(small.address) as other:
        one.ask("put", 1, 10)
        assert (one.ask("hold", 1, 10), other.ask("hold", 1, 10)) == (10, 10)
        small.restart()
        assert orphaned(client) == 10 * SLOT
        other.kill()
        time.sleep(0.6)
        assert fill_memory(client) == [20] * 10
        assert one.ask("peek")
        one.kill()
        assert nothing_held(client)


def test_two_clients_that_race_store_each_key_once(small: DaemonProcess, client: KVClient) -> None:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    with Child(small.address) as one, Child(small.address) as other:
        for seed in range(40):
            for racer in (one, other):
                racer.say("put", seed, 10)
            outcomes = list(zip(one.hear(), other.hear(), strict=True))
            assert all("stored" in pair and pair.count("stored") == 1 for pair in outcomes), outcomes
            assert {name for pair in outcomes for name in pair} <= {"stored", "exists", "in_flight"}
            assert read(client, namespace, chain(seed, 10)) == 10
    assert nothing_held(client)


def test_a_race_that_is_lost_by_death_is_won_by_the_other(small: DaemonProcess, client: KVClient) -> None:
    with Child(small.address) as one, Child(small.address) as other:
        assert one.ask("reserve", 1, 10) == ["slot"] * 10
        assert other.ask("put", 1, 10) == ["in_flight"] * 10
        one.kill()
        assert eventually(lambda: other.ask("put", 1, 10) == ["stored"] * 10, 3.0)
        assert read(client, client.open_namespace(IDENTITY, GEOMETRY), chain(1, 10)) == 10
