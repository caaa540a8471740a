"""Watch: a snapshot, then notices with a sequence; a watcher that is too slow is told to watch again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvstore import errors
from kvstore.cache.core import Cache
from kvstore.cache.messages import Notice, NoticeKind, Tier
from kvstore.cache.state import CacheSizes
from kvstore.clients import requests
from kvstore.clients.client import KVClient
from kvstore.daemon.namespaces import KnownNamespace, Namespaces
from kvstore.daemon.notices import MAX_WATCHERS, Notices
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, pattern


def opened(tenant: str = "default", shard: str = "") -> tuple[Namespaces, KnownNamespace]:
    namespaces = Namespaces(Cache(CacheSizes(4 << 20)))
    return namespaces, namespaces.open(tenant, requests.open_namespace(IDENTITY, GEOMETRY, shard, "", requests.KEEP_ALL))


def nothing(namespace: int) -> Iterator[list[tuple[str, bytes, bytes]]]:
    return iter(())


async def take(notices: Notices, namespace: KnownNamespace, publish: list[Notice], count: int) -> list[pb.WatchEvent]:
    watcher = notices.watch(namespace.tenant, namespace.id)
    for notice in publish:
        notices.publish(notice)
    events = watcher.events([namespace], nothing)
    return [await anext(events) for _ in range(count)]


def test_what_happens_during_the_snapshot_comes_after_it() -> None:
    namespaces, namespace = opened()
    stored = Notice(NoticeKind.STORED, namespace.id, Tier.DRAM, chain(1, 2), chain(1, 2))
    events = asyncio.run(take(Notices("e", namespaces), namespace, [stored], 2))
    assert [(event.kind, event.sequence, event.epoch) for event in events] == [("snapshot_end", 1, "e"), ("stored", 2, "e")]
    assert (events[1].hashes, events[1].tier) == (chain(1, 2), "dram")


def test_a_clear_is_a_notice_without_hashes() -> None:
    namespaces, namespace = opened()
    events = asyncio.run(take(Notices("e", namespaces), namespace, [Notice(NoticeKind.CLEARED, namespace.id, None)], 2))
    assert (events[1].kind, events[1].hashes, events[1].digest) == ("cleared", b"", namespace.digest)


def test_another_tenants_notices_never_arrive() -> None:
    namespaces, mine = opened()
    theirs = namespaces.open("other", requests.open_namespace(IDENTITY, GEOMETRY, "", "", requests.KEEP_ALL))
    assert theirs.digest != mine.digest
    notices = Notices("e", namespaces)
    watcher = notices.watch("default", 0)
    notices.publish(Notice(NoticeKind.STORED, theirs.id, Tier.DRAM, chain(1, 1), chain(1, 1)))
    notices.publish(Notice(NoticeKind.STORED, mine.id, Tier.DRAM, chain(2, 1), chain(2, 1)))

    async def second() -> pb.WatchEvent:
        events = watcher.events([mine], nothing)
        await anext(events)
        return await anext(events)

    assert asyncio.run(second()).hashes == chain(2, 1)


def test_another_tenants_namespace_is_not_found() -> None:
    namespaces, mine = opened()
    with pytest.raises(errors.NotFound):
        namespaces.require("other", mine.id)
    assert namespaces.require("default", mine.id) is mine
    assert namespaces.of_tenant("other") == []


def test_a_watcher_that_is_too_slow_is_told_to_watch_again() -> None:
    namespaces, namespace = opened()
    many = [Notice(NoticeKind.STORED, namespace.id, Tier.DRAM, bytes(32 * 8192), bytes(32 * 8192)) for _ in range(20)]
    with pytest.raises(errors.ResourceExhausted, match="watch again"):
        asyncio.run(take(Notices("e", namespaces), namespace, many, 2))


def test_a_large_notice_comes_in_events_of_bounded_size() -> None:
    namespaces, namespace = opened()
    large = Notice(NoticeKind.REMOVED, namespace.id, Tier.DRAM, bytes(32 * 40_000))
    events = asyncio.run(take(Notices("e", namespaces), namespace, [large], 4))
    assert [event.kind for event in events] == ["snapshot_end", "removed", "removed", "removed"]
    assert sum(len(event.hashes) for event in events) == 32 * 40_000


def test_there_are_only_so_many_watchers() -> None:
    namespaces, _ = opened()
    notices = Notices("e", namespaces)
    watchers = [notices.watch("default", 0) for _ in range(MAX_WATCHERS)]
    with pytest.raises(errors.ResourceExhausted):
        notices.watch("default", 0)
    notices.forget(watchers[0])
    notices.watch("default", 0)


def test_a_namespace_is_read_back_from_what_was_stored() -> None:
    namespace = opened(shard="tp0/2")[1]
    again = Namespaces(Cache(CacheSizes(4 << 20))).reopen(namespace.stored_facts())
    assert (again.digest, again.geometry, again.keep, again.tenant) == (namespace.digest, namespace.geometry, namespace.keep, "default")


@pytest.mark.parametrize("facts", [{}, {"tenant": "t", "fields": {}, "keep": {"kind": "all", "window_blocks": 0}}, {"fields": 3}])
def test_stored_facts_that_make_no_sense_are_a_format_error(facts: dict[str, object]) -> None:
    with pytest.raises(errors.FormatError):
        Namespaces(Cache(CacheSizes(4 << 20))).reopen(facts)


def test_a_watcher_of_a_daemon_hears_of_every_change_of_its_tiers(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        events = client.watch(namespace)
        assert next(events).kind == "snapshot_end"
        with client.put(namespace, chain(1, 3)) as put:
            for block in put.blocks:
                block.write(pattern(block.hash))
        stored: dict[str, bytes] = {"dram": b"", "nvme": b""}
        last = 1
        while len(stored["dram"]) + len(stored["nvme"]) < 6 * 32:
            event = next(events)
            assert event.sequence == last + 1
            last = event.sequence
            stored[event.tier] += event.hashes
        assert stored["dram"] == chain(1, 3)
        client.clear(namespace)
        assert any(event.kind == "cleared" for event in events)


def test_a_watch_ends_with_the_daemon(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client:
        events = client.watch()
        next(events)
        daemon.kill9()
        with pytest.raises(errors.Unavailable):
            next(events)
