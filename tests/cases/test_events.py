"""Cases 44 and 45: what a router believes of a store is what is there, after a restart, after a clear, and whenever it comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Watched
from kvstore.hashing import HASH_BYTES, fingerprint
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash
from tests.cases.children import Child
from tests.cases.figures import all_on_disk, eventually, opaque, settled, store, tier
from tests.cases.raw import Raw
from tests.daemon.faulty import FaultyDaemon

Place = tuple[bytes, str, bytes]  # the namespace's digest, the tier, the block's hash
MANY = 4000  # blocks in one commit
START_S = 20.0  # seconds for a snapshot to come: it takes milliseconds


class Router:
    """Believes what it is told, and watches again when it is told nothing more. Use it in a `with` block."""

    def __init__(self, address: str) -> None:
        self.believes: set[Place] = set()
        self.parents: dict[bytes, bytes] = {}
        self.epochs: list[str] = []
        self.snapshots = 0
        self.gaps = 0
        self._client = KVClient(address, name="router")
        self._stopped = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._client.close()
        self._thread.join(START_S)

    def places(self) -> set[Place]:
        """What it believes now."""
        return set(self.believes)

    def _run(self) -> None:
        while not self._stopped:
            self.believes.clear()
            self.parents.clear()
            sequence = 0
            try:
                for event in self._client.watch():
                    self.gaps += event.sequence != sequence + 1
                    sequence = event.sequence
                    self._hear(event)
            except errors.KVStoreError:
                time.sleep(0.05)

    def _hear(self, event: Watched) -> None:
        if event.epoch not in self.epochs:
            self.epochs.append(event.epoch)
        hashes = each_hash(event.hashes)
        places = {(event.digest, event.tier, block_hash) for block_hash in hashes}
        match event.kind:
            case "snapshot" | "stored":
                self.believes |= places
                self.parents.update(zip(hashes, each_hash(event.parents), strict=True))
            case "removed":
                self.believes -= places
            case "cleared":
                self.believes = {place for place in self.believes if place[0] != event.digest}
            case "snapshot_end":
                self.snapshots += 1
                self._started.set()


def truth(client: KVClient) -> set[Place]:
    """What is there now, as a snapshot says."""
    found: set[Place] = set()
    for event in client.watch():
        if event.kind == "snapshot_end":
            break
        found |= {(event.digest, event.tier, block_hash) for block_hash in each_hash(event.hashes)}
    return found


def right(router: Router, client: KVClient) -> bool:
    """Whether the router comes to believe just what is there."""
    return eventually(lambda: router.places() == truth(client), 10.0)


@pytest.fixture
def router(daemon: DaemonProcess) -> Iterator[Router]:
    with Router(daemon.address) as made:
        yield made


# ---- 44


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_after_a_restart_a_router_believes_only_what_is_there(daemon: DaemonProcess, client: KVClient, router: Router, kill: bool) -> None:
    """Case 44: the stream ends, the next one has another epoch and begins with a snapshot: what was only in memory is forgotten."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    store(client, namespace, chain(1, 30))
    assert all_on_disk(client, 30)
    assert right(router, client)
    assert {place[1] for place in router.places()} == {"dram", "nvme"}
    daemon.restart(kill=kill)
    assert eventually(lambda: len(router.epochs) == 2 and router.snapshots == 2)
    assert router.places() == {(namespace.digest, "nvme", block_hash) for block_hash in each_hash(chain(1, 30))}
    store(client, namespace, chain(2, 5))
    assert all_on_disk(client, 35)
    assert right(router, client)
    assert router.gaps == 0


def test_a_restart_that_lost_everything_leaves_nothing_believed(tmp_path: Path) -> None:
    """Case 44: without a disk, a router is left with nothing."""
    with DaemonProcess(tmp_path, nvme=False) as daemon, KVClient(daemon.address) as client, Router(daemon.address) as router:
        store(client, client.open_namespace(IDENTITY, GEOMETRY), chain(1, 30))
        assert eventually(lambda: len(router.places()) == 30)
        daemon.restart()
        assert eventually(lambda: router.snapshots == 2)
        assert router.places() == set()


def test_after_a_clear_a_router_believes_nothing_of_it(daemon: DaemonProcess, client: KVClient, router: Router) -> None:
    """Case 44: of that namespace, in every tier, and only of that one; what is stored again afterwards is believed again."""
    namespaces = [client.open_namespace(IDENTITY, geometry) for geometry in (GEOMETRY, opaque(5_000))]
    for namespace in namespaces:
        store(client, namespace, chain(1, 30))
    assert all_on_disk(client, 60)
    assert eventually(lambda: len(router.places()) == 120)
    client.clear(namespaces[0])
    assert eventually(lambda: {place[0] for place in router.places()} == {namespaces[1].digest})
    store(client, namespaces[0], chain(1, 10))
    assert settled(client)
    assert right(router, client)
    client.clear()
    assert eventually(lambda: router.places() == set())
    assert router.snapshots == 1, "nothing of this needs another snapshot"
    assert router.gaps == 0


def test_what_is_evicted_and_lost_is_no_longer_believed(tmp_path: Path) -> None:
    """Case 44: eviction from each tier, and blocks that the disk does not give back, are told like everything else."""
    sick = FaultyDaemon(tmp_path, dram="8MiB", nvme_bytes="16MiB")
    with sick as daemon, KVClient(daemon.address) as client, Router(daemon.address) as router:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        for seed in range(80):
            store(client, namespace, chain(seed, 20))
            assert seed % 20 or settled(client)  # so that the disk keeps up
        assert settled(client)
        counters = client.stats().counters
        assert min(counters["evicted_dram"], counters["evicted_nvme"]) > 0
        assert right(router, client)
        sick.fault("EIO", "read")
        for seed in range(80):
            with client.get(namespace, chain(seed, 20)):
                pass
        assert client.stats().counters["unreadable_blocks"] > 0
        sick.heal()
        assert settled(client)
        assert right(router, client)
        assert (router.snapshots, router.gaps) == (1, 0)


def test_a_router_that_is_too_slow_is_told_and_starts_again(tmp_path: Path) -> None:
    """Case 44: its queue has a limit; past it the stream ends in words, and another snapshot makes it right."""
    constants = "kvstore.daemon.notices.MAX_QUEUED_BYTES=100000"
    small = opaque(100)
    with FaultyDaemon(tmp_path, constants=constants, nvme=False) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, small)
        slow = client.watch(namespace)
        assert next(slow).kind == "snapshot_end"
        with Raw(daemon.address) as raw:
            mine, keys = raw.open(small), chain(1, MANY)
            for number in range(1, 31):  # ten megabytes of notices: more than the sockets' buffers hold
                slots = raw.slots(requests.reserve(number, mine, count=MANY))
                raw.slots(requests.commit(number, mine, (slots.units, slots.generations), keys, bytes(32)))
                raw.ask(requests.release(number))
                client.clear(namespace)
        with pytest.raises(errors.ResourceExhausted, match="watch again"):
            list(slow)
        store(client, namespace, chain(1, 30))
        with Router(daemon.address) as router:
            assert right(router, client)


# ---- 45


def test_an_indexer_that_comes_late_places_every_block(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 45: its snapshot has each block's parent: every chain leads to its root, and what is stored later hangs from what it has."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    for seed in range(10):
        store(client, namespace, chain(seed, 20))
    assert all_on_disk(client, 200)
    daemon.restart()
    with Router(daemon.address) as late:
        store(client, namespace, chain(3, 40)[20 * HASH_BYTES :], chain(3, 20)[-HASH_BYTES:])
        assert eventually(lambda: len(late.parents) == 220)
        root = fingerprint(IDENTITY)
        assert [depth(late, chain(seed, 20)[-HASH_BYTES:], root) for seed in range(10)] == [20] * 10
        assert depth(late, chain(3, 40)[-HASH_BYTES:], root) == 40


def depth(router: Router, block_hash: bytes, root: bytes) -> int:
    """How many blocks lie between a block and the root, both ends but the root included."""
    steps = 0
    while block_hash != root:
        block_hash = router.parents[block_hash]
        steps += 1
    return steps


def test_indexers_that_come_at_any_moment_end_up_believing_the_same(tmp_path: Path) -> None:
    """Case 45: under load, with eviction from both tiers: each was right from its snapshot on."""
    with DaemonProcess(tmp_path, dram="8MiB", nvme_bytes="16MiB") as daemon, KVClient(daemon.address) as client:
        with Child(daemon.address) as one, Child(daemon.address) as two:
            for number, child in enumerate((one, two)):
                child.ask("lookup", 1, 1)
                child.say("work", number, 150, 2.5)
            routers = []
            for _ in range(5):
                routers.append(Router(daemon.address).__enter__())
                time.sleep(0.3)
            counts = [child.hear() for child in (one, two)]
        assert settled(client)
        assert all(count["stored"] > 0 and count["wrong"] == 0 for count in counts)
        try:
            assert all(right(router, client) for router in routers)
            assert [(router.snapshots, router.gaps) for router in routers] == [(1, 0)] * 5
            assert tier(client, "dram").blocks > 0
        finally:
            for router in routers:
                router.__exit__()
