"""What the store tells of blocks that are followed: a tier has one where all ranks have it; nothing is believed of a store that is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.clients.client import KVClient
from kvstore.clients.vllm_residency import Change, Member, Residency
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash
from tests.cases.figures import all_on_disk, eventually, store

PROMPT = chain(1, 6)
BLOCKS = each_hash(PROMPT)
MEMBERS = [Member(IDENTITY, GEOMETRY, shard) for shard in ("tp0/2", "tp1/2")]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path) as process:
        yield process


def believing(residency: Residency, all_of: list[Change]) -> Callable[[], set[tuple[bytes, str]]]:
    """What one believes who hears the changes; `all_of` gets each."""
    believed: set[tuple[bytes, str]] = set()

    def hear() -> set[tuple[bytes, str]]:
        for change in residency.changes():
            all_of.append(change)
            place = (change.block, change.tier)
            if change.here:
                believed.add(place)
            else:
                believed.remove(place)  # it was said to be there
        return believed

    return hear


def places(*tiers: str) -> set[tuple[bytes, str]]:
    return {(block, tier) for block in BLOCKS for tier in tiers}


def test_what_is_told_is_what_all_ranks_have(daemon: DaemonProcess) -> None:
    changes: list[Change] = []
    residency = Residency(daemon.address, MEMBERS)
    hear = believing(residency, changes)
    try:
        with KVClient(daemon.address) as client:
            one, two = (client.open_namespace(each.identity, each.geometry, each.shard) for each in MEMBERS)
            residency.follow(BLOCKS)
            store(client, one, PROMPT)
            assert eventually(lambda: all(residency.is_somewhere(block) for block in BLOCKS))
            assert hear() == set()
            store(client, two, PROMPT)
            store(client, two, chain(2, 3))  # which nobody follows
            assert all_on_disk(client, 15)
            assert eventually(lambda: hear() == places("dram", "nvme"))
            assert sorted(change.block for change in changes if change.tier == "dram") == sorted(BLOCKS)  # each once
            client.clear(one)
            assert eventually(lambda: hear() == set())
            store(client, one, PROMPT)
            assert all_on_disk(client, 15)
            assert eventually(lambda: hear() == places("dram", "nvme"))
            daemon.kill9()
            assert eventually(lambda: hear() == set())
            daemon.start()
            assert eventually(lambda: hear() == places("nvme"))
    finally:
        residency.close()


def test_a_leased_block_is_in_memory_and_told_of_anew(daemon: DaemonProcess) -> None:
    """Who lost what was told before hears of a block again when it is loaded; one that is forgotten is told of no more."""
    changes: list[Change] = []
    residency = Residency(daemon.address, MEMBERS[:1])
    hear = believing(residency, changes)
    try:
        with KVClient(daemon.address) as client:
            namespace = client.open_namespace(IDENTITY, GEOMETRY, "tp0/2")
            residency.follow(BLOCKS)
            store(client, namespace, PROMPT)
            assert eventually(lambda: {place for place in hear() if place[1] == "dram"} == places("dram"))
            changes.clear()
            residency.follow(BLOCKS[:2], leased=True)
            hear()
            assert {change.block for change in changes if change.tier == "dram"} == set(BLOCKS[:2])
            assert "dram" in residency.forget(BLOCKS[0])
            assert residency.forget(BLOCKS[0]) == set()
            client.clear()
            assert eventually(lambda: {block for block, _ in hear()} == {BLOCKS[0]})
    finally:
        residency.close()
