"""Clients across restarts of the daemon: held leases are clearly dead, memory in hand stays what it was, new calls work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore import errors
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.lease import Lease
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, pattern, right
from tests.cases.figures import eventually
from tests.clients.kinds import KINDS, Client, make


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    made = make(request.param, daemon.address, monkeypatch)
    yield made
    made.close()


def store(client: Client | KVClient, hashes: bytes) -> None:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    with client.put(namespace, hashes) as put:
        for block in put.blocks:
            block.write(pattern(block.hash))
    assert put.stored == len(hashes) // 32


def on_disk(client: Client, blocks: int) -> bool:
    return next(tier.blocks for tier in client.stats().tiers if tier.tier == "nvme") >= blocks


def is_over(lease: Lease) -> bool:
    """Whether the client has heard that it is."""
    try:
        lease.check()
    except errors.SessionEnded:
        return True
    return False


def test_the_same_namespace_works_after_a_restart(client: Client, daemon: DaemonProcess) -> None:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    hashes = chain(1, 5)
    store(client, hashes)
    assert eventually(lambda: on_disk(client, 5))
    before = namespace.epoch
    daemon.restart()
    assert client.lookup(namespace, hashes).blocks == 5
    assert namespace.epoch != before
    with client.get(namespace, hashes) as lease:
        assert lease.blocks == 5
        assert right(lease.views, hashes)


def test_ids_of_an_earlier_run_never_reach_another_namespace(client: Client, daemon: DaemonProcess) -> None:
    """Ids are given out in order of opening: after a restart without a disk the same number may mean another model."""
    first = client.open_namespace(IDENTITY, GEOMETRY, "tp0/2")
    store(client, chain(2, 2))
    daemon.flags += ["--nvme", ""]
    daemon.restart()
    with KVClient(daemon.address) as other:
        second = other.open_namespace(IDENTITY, GEOMETRY, "tp1/2")
        with other.put(second, chain(2, 2)) as put:
            for block in put.blocks:
                block.write(pattern(block.hash))
        assert second.id == first.id
    assert client.lookup(first, chain(2, 2)).blocks == 0


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_lease_held_over_a_restart_says_that_it_is_dead(kind: str, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make(kind, daemon.address, monkeypatch)
    hashes = chain(3, 4)
    store(client, hashes)
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    with client.get(namespace, hashes) as lease:
        views = lease.views
        daemon.restart()
        client.lookup(namespace, hashes)
        with client.get(namespace, chain(4, 1)):
            pass
        with pytest.raises(errors.StaleEpoch, match="restarted"):
            _ = lease.views
        with pytest.raises(errors.StaleEpoch):
            lease.copy_into([bytearray(GEOMETRY.block_bytes)])
        for seed in range(10, 14):
            store(client, chain(seed, 900))
        assert right(views, hashes), "what a survivor holds is not overwritten"
    client.close()


def test_a_lease_whose_daemon_is_away_says_that_the_session_ended(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        hashes = chain(5, 2)
        store(client, hashes)
        with client.get(namespace, hashes) as lease:
            daemon.kill9()
            assert eventually(lambda: is_over(lease))
            with pytest.raises(errors.SessionEnded, match="make new ones"):
                lease.check()
        with pytest.raises(errors.Unavailable), client.get(namespace, hashes):
            pass
        daemon.start()
        with client.get(namespace, hashes) as lease:
            lease.check()


def test_a_put_begun_before_a_restart_fails_and_stores_nothing(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        hashes = chain(6, 2)

        def put_over_a_restart() -> None:
            with client.put(namespace, hashes) as put:
                daemon.restart()
                for block in put.blocks:
                    block.write(pattern(block.hash))

        with pytest.raises((errors.SessionEnded, errors.StaleEpoch)):
            put_over_a_restart()
        assert client.lookup(namespace, hashes).blocks == 0
        store(client, hashes)
        assert client.lookup(namespace, hashes).blocks == 2


def test_an_orderly_stop_tells_the_clients(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, chain(7, 2))
        with client.get(namespace, chain(7, 2)) as lease:
            assert daemon.stop() == 0
            assert eventually(lambda: is_over(lease))
            with pytest.raises(errors.SessionEnded, match="shutting down"):
                lease.check()


def test_an_id_is_given_for_its_own_epoch_alone() -> None:
    """Another thread may open the namespace anew while one is about to use it under its session's epoch."""
    namespace = Namespace(IDENTITY, GEOMETRY, pb.OpenNamespaceRequest(), ("new", 7))
    assert namespace.id_in("new") == 7
    with pytest.raises(errors.StaleEpoch):
        namespace.id_in("old")
