"""Case 19: the ranks of one model find the same prefix, however unevenly their blocks were evicted or lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.clients import requests
from kvstore.clients.answers import Slotted
from kvstore.clients.client import KVClient
from kvstore.clients.requests import Keep
from kvstore.clients.session import Granting
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import BLOCK_TOKENS, GEOMETRY, IDENTITY, chain, each_hash, pattern
from tests.cases.disks import flip
from tests.cases.figures import all_on_disk, eventually, opaque, read, store, store_each, tier
from tests.cases.raw import Raw

BLOCKS = 60
PROMPT = chain(1, BLOCKS)
SLOTS = 512  # of 16 KiB in 8 MiB
SHARDS = ("tp0/2", "tp1/2")
FILLER = replace(IDENTITY, model="another")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon with room for 512 blocks of 16 KiB in memory, and no disk."""
    with DaemonProcess(tmp_path, dram="8MiB", nvme=False) as process:
        yield process


def ranks(address: str) -> tuple[Raw, Raw, list[int]]:
    """Two sessions, each of a rank that keeps half of the heads, joined; and the members of their group."""
    one, two = Raw(address), Raw(address)
    members = [one.open(GEOMETRY, shard) for shard in SHARDS]
    for session in (one, two):
        session.join("model", members)
    return one, two, members


def claim(session: Raw, lease: int, member: int) -> Slotted:
    """A member's own slots under a lease of the group."""
    return session.slots(pb.Op(claim=pb.Claim(lease=lease, group="model", namespace_id=member)))


def right(session: Raw, units: np.ndarray[tuple[int], np.dtype[np.uint32]], size_bytes: int = GEOMETRY.block_bytes) -> bool:
    """Whether these slots hold the prompt's leading blocks."""
    views = [session.attached.arena.view(each, size_bytes) for each in units.tolist()]
    return all(np.array_equal(view, pattern(key, size_bytes)) for view, key in zip(views, each_hash(PROMPT), strict=False))


def blocks_of(granting: Granting) -> tuple[int, int]:
    """How many blocks each of two members was granted."""
    filled = (granting.generations > 0).sum(axis=1)
    return int(filled[0]), int(filled[1])


@pytest.mark.parametrize("poorer", [0, 1], ids=["first", "second"])
def test_ranks_find_what_the_poorest_has(small: DaemonProcess, poorer: int) -> None:
    """Case 19: after a partial eviction in one rank alone both are granted the minimum, and nothing more is held."""
    with KVClient(small.address) as client:
        namespaces = [client.open_namespace(IDENTITY, GEOMETRY, shard) for shard in SHARDS]
        for namespace in namespaces:
            store(client, namespace, PROMPT)
        assert read(client, namespaces[1 - poorer], PROMPT) == BLOCKS  # so that the other's are the colder ones
        store_each(client, client.open_namespace(FILLER, GEOMETRY), chain(2, SLOTS - 2 * BLOCKS + 25))
        assert client.lookup(namespaces[poorer], PROMPT).blocks == BLOCKS - 25
        assert client.lookup(namespaces[1 - poorer], PROMPT).blocks == BLOCKS
        one, two, members = ranks(small.address)
        with one, two:
            assert [session.lookup(PROMPT, group="model") for session in (one, two)] == [BLOCKS - 25] * 2
            granting = one.acquire(7, PROMPT, group="model")
            assert blocks_of(granting) == (BLOCKS - 25, BLOCKS - 25)
            assert tier(client, "dram").held_bytes == 2 * (BLOCKS - 25) * GEOMETRY.slot_bytes
            claimed = claim(two, 7, members[1])
            assert np.array_equal(claimed.units, granting.units[1])
            assert right(one, granting.units[0])
            assert right(two, claimed.units)
            one.ask(requests.release(7))
            two.ask(requests.release(7))
            assert tier(client, "dram").held_bytes == 0


def test_groups_of_other_sizes_find_the_minimum(small: DaemonProcess) -> None:
    """Case 19: the same where members' blocks differ in size, and only one size was pushed out."""
    with KVClient(small.address) as client, Raw(small.address) as session:
        geometries = (opaque(16_384), opaque(4_000))
        for geometry in geometries:
            store(client, client.open_namespace(IDENTITY, geometry), PROMPT)
        store_each(client, client.open_namespace(FILLER, geometries[0]), chain(2, 3 * 128 - BLOCKS + 10))  # one extent is the other size's
        members = [session.open(geometry) for geometry in geometries]
        session.join("model", members)
        alone = [session.lookup(PROMPT, namespace=member) for member in members]
        assert alone == [BLOCKS - 10, BLOCKS]
        assert session.lookup(PROMPT, group="model") == BLOCKS - 10
        granting = session.acquire(1, PROMPT, group="model")
        assert blocks_of(granting) == (BLOCKS - 10, BLOCKS - 10)
        assert all(right(session, units, geometry.block_bytes) for units, geometry in zip(granting.units, geometries, strict=True))
        assert tier(client, "dram").held_bytes == (BLOCKS - 10) * (16_384 + 4_096)


def test_a_block_lost_in_one_rank_shortens_all(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 19: a block that cannot be brought up for one rank ends the prefix of every rank, and the excess is let go."""
    for shard in SHARDS:
        store(client, client.open_namespace(IDENTITY, GEOMETRY, shard), PROMPT)
    assert all_on_disk(client, 2 * BLOCKS)
    daemon.restart(kill=False)
    lost = (daemon.data / "data").read_bytes().index(pattern(each_hash(PROMPT)[33]).tobytes())  # one of the two copies
    flip(daemon.data / "data", lost, 5)
    one, two, members = ranks(daemon.address)
    with one, two:
        granting = one.acquire(7, PROMPT, group="model")
        assert blocks_of(granting) == (33, 33)
        assert granting.ended in ("failed", "missing")  # missing: the disk had been looked over meanwhile
        assert right(one, granting.units[0])
        assert len(claim(two, 7, members[1]).units) == 33
        assert eventually(lambda: tier(client, "dram").held_bytes == 66 * GEOMETRY.slot_bytes)
        assert one.lookup(PROMPT, group="model") == 33


def test_a_window_is_granted_with_what_it_needs(small: DaemonProcess) -> None:
    """Case 19: a member that keeps a window counts only where its window is whole, and holds nothing before it."""
    window = Keep("window", 4 * BLOCK_TOKENS)
    with KVClient(small.address) as client, Raw(small.address) as session:
        whole = client.open_namespace(IDENTITY, GEOMETRY)
        local = client.open_namespace(IDENTITY, GEOMETRY, kv_group="local", keep=window)
        store(client, whole, PROMPT)
        keys = each_hash(PROMPT)
        for start, end in ((10, 20), (40, 43)):  # the second run is shorter than a window
            store(client, local, b"".join(keys[start:end]), keys[start - 1])
        session.join("model", [session.open(), session.open(kv_group="local", keep=window)])
        assert session.lookup(PROMPT, group="model") == 20
        granting = session.acquire(1, PROMPT, group="model")
        assert blocks_of(granting) == (20, 4)
        assert (granting.generations[1] > 0).tolist() == [False] * 16 + [True] * 4
        assert tier(client, "dram").held_bytes == 24 * GEOMETRY.slot_bytes


def test_a_groups_lease_outlives_the_rank_that_took_it(small: DaemonProcess) -> None:
    """Case 19: when one rank ends, what the others read stays theirs; with the last of them it is free."""
    with KVClient(small.address) as client:
        for shard in SHARDS:
            store(client, client.open_namespace(IDENTITY, GEOMETRY, shard), PROMPT)
        one, two, members = ranks(small.address)
        with two:
            with one:
                one.acquire(7, PROMPT, group="model")
            claimed = claim(two, 7, members[1])
            store_each(client, client.open_namespace(FILLER, GEOMETRY), chain(2, SLOTS))
            assert len(claimed.units) == BLOCKS
            assert right(two, claimed.units)
            assert client.lookup(client.open_namespace(IDENTITY, GEOMETRY, SHARDS[0]), PROMPT).blocks == BLOCKS
        assert eventually(lambda: tier(client, "dram").held_bytes == 0)
