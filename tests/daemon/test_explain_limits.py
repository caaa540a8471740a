"""Explain and ListNamespaces where there is much of everything: the loop stays free, the reply small, and numbers fit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import pytest

from kvstore.cache.core import Cache
from kvstore.cache.messages import UNIT_BYTES, Attach, Commit, Hashes, NamespaceSpec, Reserve, Reserved
from kvstore.cache.state import CacheSizes
from kvstore.clients.client import KVClient
from kvstore.daemon import explaining, wire
from kvstore.daemon.explaining import MAX_AT_ONCE, MAX_ELSEWHERE, MAX_WAITING, Asked, Few, explain, list_namespaces
from kvstore.daemon.hub import Hub
from kvstore.daemon.namespaces import KnownNamespace, Namespaces
from kvstore.errors import ResourceExhausted
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY

T = TypeVar("T")
UNITS = 64


@dataclass
class Cores:
    """Of a hub, what is asked here: its cores, the first of them dram's, the others those of pools; and its namespaces."""

    cores: tuple[Cache, ...]
    namespaces: Namespaces
    epoch: str = "epoch"

    def caches(self) -> tuple[Cache, ...]:
        return self.cores


def hub_of(pools: int = 0) -> tuple[Hub, Namespaces]:
    cores = tuple(
        Cache(CacheSizes(UNITS * UNIT_BYTES, dram_extent_bytes=UNITS * UNIT_BYTES // 4, index_blocks=400)) for _ in range(1 + pools)
    )
    namespaces = Namespaces(cores[0])
    for core in cores:
        core.dram_ready(UNITS)
        core.attach(Attach(1, "tenant"), 0.0)

    def also(number: int, spec: NamespaceSpec) -> None:
        assert [pool.open_namespace(spec) for pool in cores[1:]] == [number] * pools

    namespaces.also = also
    return cast(Hub, Cores(cores, namespaces)), namespaces


def opened(namespaces: Namespaces, model: str, block_tokens: int, window_tokens: int = 0, tenant: str = "tenant") -> KnownNamespace:
    """A namespace whose blocks have 4 KiB, however many tokens."""
    geometry = pb.Geometry(kind="mha", layers=1, kv_heads=1, key_dim=1, value_dim=1, dtype="bfloat16", block_tokens=block_tokens)
    geometry.format, geometry.opaque_block_bytes = "test/1", UNIT_BYTES
    facts = {"model": model, "revision": "", "tokenizer": "", "position": "", "dtype": "bfloat16"}
    keep = pb.Keep(kind="window", window_tokens=window_tokens) if window_tokens else None
    return namespaces.open(tenant, pb.OpenNamespaceRequest(facts=facts, geometry=geometry, keep=keep))


def store(core: Cache, namespace: int, hashes: Hashes, session: int = 1) -> None:
    got = core.reserve(Reserve(session, 1, namespace, len(hashes)))
    assert isinstance(got, Reserved)
    core.commit(Commit(session, namespace, namespace, got.units, got.generations, hashes, np.zeros((1, 4), "<u8")))


def chain(blocks: int) -> Hashes:
    made: Hashes = np.random.default_rng(0).integers(1, 2**63, (blocks, 4)).astype("<u8")
    return made


async def rounds_of(asked: Awaitable[T]) -> tuple[int, T]:
    """How often the loop had others' turn meanwhile."""
    task, rounds = asyncio.ensure_future(asked), 0
    while not task.done():
        await asyncio.sleep(0)
        rounds += 1
    return rounds, task.result()


def test_blocks_of_pools_are_in_hbm() -> None:
    hub, namespaces = hub_of(pools=2)
    known = opened(namespaces, "model", 16)
    for core, blocks in zip(hub.caches(), (1, 2, 3), strict=True):
        store(core, known.id, chain(blocks))
    (listed,) = asyncio.run(list_namespaces(hub, "tenant")).namespaces
    assert dict(listed.blocks) == {"dram": 1, "hbm": 5}


def test_of_other_tenants_nothing_is_told() -> None:
    hub, namespaces = hub_of()
    hub.caches()[0].attach(Attach(2, "another"), 0.0)
    here, theirs = opened(namespaces, "model", 16), opened(namespaces, "secret", 16, tenant="another")
    hashes = chain(4)
    store(hub.caches()[0], theirs.id, hashes, session=2)
    for tenant, mine in (("tenant", here), ("another", theirs)):
        assert [each.digest for each in asyncio.run(list_namespaces(hub, tenant)).namespaces] == [mine.digest]
    asked = Asked.of(pb.ExplainRequest(hashes=hashes.tobytes()))
    told = asyncio.run(explain(hub, here, asked))
    assert (told.blocks, told.reason, told.later_blocks, list(told.elsewhere)) == (0, "not_stored", 0, [])
    assert asyncio.run(explain(hub, theirs, asked)).blocks == len(hashes)


def test_numbers_past_32_bits_are_told() -> None:
    hub, namespaces = hub_of()
    here, longest = opened(namespaces, "here", 16), opened(namespaces, "longest", 2**20, 2**32 - 1)
    window = opened(namespaces, "window", 2**20, 1)
    hashes = chain(8192)
    store(hub.caches()[0], window.id, hashes[-1:])
    keeps = {each.digest: each.keep for each in asyncio.run(list_namespaces(hub, "tenant")).namespaces}
    again = wire.keep_of(keeps[longest.digest], longest.geometry.block_tokens)
    assert again == longest.keep
    told = asyncio.run(explain(hub, here, Asked.of(pb.ExplainRequest(hashes=hashes.tobytes()))))
    assert [(each.digest, each.blocks, each.tokens) for each in told.elsewhere] == [(window.digest, 8192, 8192 * 2**20)]


def test_others_have_their_turn_between_any_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "TURN_S", 0.0)  # every step is too long
    hub, namespaces = hub_of()
    known = [opened(namespaces, f"model {number}", 1024) for number in range(20)]
    asked = Asked.of(pb.ExplainRequest(token_ids=np.arange(2000, dtype="<u4").tobytes(), adapter="adapter", salt="salt"))
    assert asyncio.run(rounds_of(explain(hub, known[0], asked)))[0] >= 4 * len(known)
    assert asyncio.run(rounds_of(list_namespaces(hub, "tenant")))[0] >= len(known)


def test_no_more_places_are_told_than_can_be_read_and_those_are_the_best() -> None:
    hub, namespaces = hub_of()
    here, hashes = opened(namespaces, "here", 16), chain(12)
    for blocks in (1, 5, 3, 2, 4, 6, 1, 7, 2, 8):
        store(hub.caches()[0], opened(namespaces, f"model {namespaces.of_tenant('tenant')[-1].id}", 16).id, hashes[:blocks])
    told = asyncio.run(explain(hub, here, Asked.of(pb.ExplainRequest(hashes=hashes.tobytes()))))
    assert [each.blocks for each in told.elsewhere] == [8, 7, 6, 5, 4, 3, 2, 2]
    assert len(told.elsewhere) == MAX_ELSEWHERE


def test_few_are_carried_out_at_once_and_few_wait() -> None:
    async def crowd() -> tuple[int, int]:
        few, end = Few(), asyncio.Event()
        inside = most = refused = 0

        async def one() -> None:
            nonlocal inside, most, refused
            try:
                async with few.one():
                    inside += 1
                    most = max(most, inside)
                    await end.wait()
                    inside -= 1
            except ResourceExhausted:
                refused += 1

        asking = [asyncio.create_task(one()) for _ in range(MAX_AT_ONCE + MAX_WAITING + 3)]
        await asyncio.sleep(0)
        for waiting in asking[MAX_AT_ONCE + 1 : MAX_AT_ONCE + 10]:  # who goes away makes room
            waiting.cancel()
        await asyncio.sleep(0)
        asking += [asyncio.create_task(one()) for _ in range(9)]
        await asyncio.sleep(0)
        end.set()
        await asyncio.gather(*asking, return_exceptions=True)
        async with few.one():
            return most, refused

    assert asyncio.run(crowd()) == (MAX_AT_ONCE, 3)


def test_a_client_gets_all_namespaces_in_however_many_replies_they_come(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, dram="8MiB", nvme=False) as daemon, KVClient(daemon.address) as client:
        long = replace(IDENTITY, revision="r" * 4096, tokenizer="t" * 4096)
        digests = [client.open_namespace(replace(long, model=str(number)), GEOMETRY).digest for number in range(300)]
        listed = client.namespaces()
        assert listed.ByteSize() > 2 * wire.MAX_REPLY_BYTES
        assert [each.digest for each in listed.namespaces] == digests
