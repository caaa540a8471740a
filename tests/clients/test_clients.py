"""What every kind of client does, against a real daemon: one suite, three implementations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import errors
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.requests import Keep
from kvstore.hashing import Identity
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import BLOCK_TOKENS, GEOMETRY, IDENTITY, chain, each_hash, pattern, right, tokens_of
from tests.clients.kinds import KINDS, Client, make


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon")) as process:
        yield process


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, shared: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    made = make(request.param, shared.address, monkeypatch)
    made.clear()
    yield made
    made.close()


@pytest.fixture
def namespace(client: Client) -> Namespace:
    return client.open_namespace(IDENTITY, GEOMETRY)


def store(client: Client, namespace: Namespace, hashes: bytes) -> None:
    with client.put(namespace, hashes) as put:
        for block in put.blocks:
            block.write(pattern(block.hash))
    assert put.stored == len(hashes) // 32


def test_what_was_put_is_found_by_the_very_next_lookup(client: Client, namespace: Namespace, shared: DaemonProcess) -> None:
    hashes = chain(1, 5)
    assert client.lookup(namespace, hashes).blocks == 0
    store(client, namespace, hashes)
    with KVClient(shared.address) as other:
        found = other.lookup(other.open_namespace(IDENTITY, GEOMETRY), hashes)
    assert found.blocks == 5
    assert found.tiers == ("dram",) * 5


def test_a_lease_has_the_bytes_that_were_put(client: Client, namespace: Namespace) -> None:
    hashes = chain(2, 6)
    store(client, namespace, hashes)
    with client.get(namespace, hashes) as lease:
        assert lease.blocks == 6
        assert right(lease.views, hashes)
        assert not lease.views[0].flags.writeable


def test_a_lease_ends_where_the_chain_is_broken(client: Client, namespace: Namespace) -> None:
    hashes = chain(3, 4)
    store(client, namespace, hashes[: 32 * 2])
    with client.get(namespace, hashes) as lease:
        assert lease.blocks == 2
    with client.get(namespace, chain(4, 3)) as lease:
        assert lease.blocks == 0
        assert len(lease.views) == 0


@pytest.mark.parametrize(("extra", "usable"), [(-1, 2), (0, 2), (1, 3)])
def test_the_last_token_of_a_prompt_is_never_taken_from_the_store(
    client: Client, namespace: Namespace, extra: int, usable: int
) -> None:
    store(client, namespace, chain(5, 3))
    prompt = tokens_of(5, 3)[: 3 * BLOCK_TOKENS + extra]
    assert client.lookup(namespace, tokens=prompt).blocks == usable
    with client.get(namespace, tokens=prompt) as lease:
        assert lease.blocks == usable


def test_copy_into_fills_the_callers_buffers(client: Client, namespace: Namespace) -> None:
    hashes = chain(6, 3)
    store(client, namespace, hashes)
    buffers = [bytearray(GEOMETRY.block_bytes) for _ in range(2)]
    with client.get(namespace, hashes) as lease:
        assert lease.copy_into(buffers) == 2
        with pytest.raises(errors.InvalidArgument, match="same size"):
            lease.copy_into([bytearray(3)])
        with pytest.raises(errors.InvalidArgument, match="read-only"):
            lease.copy_into([memoryview(bytes(GEOMETRY.block_bytes))])
    assert right([np.frombuffer(buffer, np.uint8) for buffer in buffers], hashes)


def test_a_lease_cannot_be_used_after_its_with_block(client: Client, namespace: Namespace) -> None:
    store(client, namespace, chain(7, 1))
    with client.get(namespace, chain(7, 1)) as lease:
        pass
    with pytest.raises(errors.SessionEnded, match="given back"):
        _ = lease.views


def test_an_exception_in_the_block_stores_nothing(client: Client, namespace: Namespace) -> None:
    hashes = chain(8, 2)

    def fail_half_way() -> None:
        with client.put(namespace, hashes) as put:
            put.blocks[0].write(pattern(put.blocks[0].hash))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail_half_way()
    assert client.lookup(namespace, hashes).blocks == 0
    store(client, namespace, hashes)


def test_only_the_blocks_before_the_first_unfilled_one_are_committed(client: Client, namespace: Namespace) -> None:
    hashes = chain(9, 4)
    with client.put(namespace, hashes) as put:
        for index in (0, 1, 3):
            put.blocks[index].write(pattern(put.blocks[index].hash))
    assert put.names == ("stored", "stored", "none", "none")
    assert put.stored == 2
    assert client.lookup(namespace, hashes).blocks == 2


def test_blocks_that_are_stored_need_no_writing(client: Client, namespace: Namespace) -> None:
    hashes = chain(10, 4)
    store(client, namespace, hashes[: 32 * 3])
    with client.put(namespace, hashes) as put:
        assert [block.index for block in put.blocks] == [3]
        put.blocks[0].write(pattern(put.blocks[0].hash))
    assert put.names == ("exists", "exists", "exists", "stored")
    assert put.stored == 4


def test_the_rest_of_a_chain_goes_under_its_parent(client: Client, namespace: Namespace) -> None:
    hashes = chain(11, 4)
    store(client, namespace, hashes[: 32 * 2])
    with client.put(namespace, hashes[32 * 2 :], parent=hashes[32:64]) as put:
        for block in put.blocks:
            block.write(pattern(block.hash))
    assert client.lookup(namespace, hashes).blocks == 4


def test_a_block_of_the_wrong_size_cannot_be_written(client: Client, namespace: Namespace) -> None:
    with client.put(namespace, chain(12, 1)) as put, pytest.raises(errors.InvalidArgument, match="same size"):
        put.blocks[0].write(b"short")
    assert put.stored == 0


def test_views_of_a_put_are_sealed_when_it_ends(client: Client, namespace: Namespace) -> None:
    with client.put(namespace, chain(13, 1)) as put:
        view = put.blocks[0].view
        put.blocks[0].write(pattern(put.blocks[0].hash))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_pinning_counts_what_changed(client: Client, namespace: Namespace) -> None:
    hashes = chain(14, 3)
    store(client, namespace, hashes[: 32 * 2])
    assert client.pin(namespace, hashes) == 2
    assert client.pin(namespace, hashes) == 0
    assert client.unpin(namespace, hashes) == 2


def test_prefetch_counts_what_is_in_memory_already(client: Client, namespace: Namespace) -> None:
    hashes = chain(15, 3)
    store(client, namespace, hashes)
    assert client.prefetch(namespace, hashes) == (0, 3)


def test_clear_says_what_it_cleared_and_nothing_is_found(client: Client, namespace: Namespace) -> None:
    hashes = chain(16, 3)
    store(client, namespace, hashes)
    other = client.open_namespace(Identity(model="another", dtype="bfloat16"), GEOMETRY)
    assert client.clear(other).blocks == 0
    cleared = client.clear(namespace)
    assert (cleared.blocks, cleared.dram_bytes) == (3, 3 * GEOMETRY.slot_bytes)
    assert client.lookup(namespace, hashes).blocks == 0


def test_stats_add_up_to_the_capacity(client: Client, namespace: Namespace) -> None:
    store(client, namespace, chain(17, 3))
    reply = client.stats()
    for tier in reply.tiers:
        assert sum(tier.class_bytes.values()) == tier.capacity_bytes
    assert next(tier.blocks for tier in reply.tiers if tier.tier == "dram") >= 3


def test_watch_begins_with_a_snapshot_and_goes_on_with_notices(client: Client, namespace: Namespace) -> None:
    first, second = chain(18, 2), chain(19, 2)
    store(client, namespace, first)
    events = iter(client.watch(namespace))
    seen = b""
    while (event := next(events)).kind != "snapshot_end":
        seen += event.hashes if event.tier == "dram" else b""
    assert sorted(each_hash(seen)) == sorted(each_hash(first))
    store(client, namespace, second)
    hashes = parents = b""
    while len(hashes) < len(second):
        event = next(events)
        assert event.digest == namespace.digest
        if event.kind == "stored" and event.tier == "dram":
            hashes, parents = hashes + event.hashes, parents + event.parents
    assert hashes == second
    assert parents == namespace.root + second[:32]


def test_another_salt_or_adapter_finds_nothing(client: Client, namespace: Namespace) -> None:
    store(client, namespace, chain(20, 3))
    for other in (Identity(**{**IDENTITY.fields(), "salt": "s"}), Identity(**{**IDENTITY.fields(), "adapter": "a"})):
        assert client.lookup(namespace, tokens=tokens_of(20, 3), identity=other).blocks == 0


@pytest.mark.parametrize("field", ["model", "revision", "tokenizer", "position", "dtype"])
def test_another_fact_is_another_namespace(client: Client, namespace: Namespace, field: str) -> None:
    hashes = chain(21, 2)
    store(client, namespace, hashes)
    value = '{"rope_type": "linear"}' if field == "position" else "other"
    other = client.open_namespace(Identity(**{**IDENTITY.fields(), field: value}), GEOMETRY)
    assert other.digest != namespace.digest
    assert client.lookup(other, hashes).blocks == 0


def test_another_geometry_or_shard_is_another_namespace(client: Client, namespace: Namespace) -> None:
    hashes = chain(22, 2)
    store(client, namespace, hashes)
    for other in (client.open_namespace(IDENTITY, GEOMETRY.with_layers(1)), client.open_namespace(IDENTITY, GEOMETRY, "tp1/2")):
        assert client.lookup(other, hashes).blocks == 0


@pytest.mark.parametrize("tokens", [[], [1], list(range(BLOCK_TOKENS))])
def test_a_prompt_without_a_usable_block_finds_nothing(client: Client, namespace: Namespace, tokens: list[int]) -> None:
    assert client.lookup(namespace, tokens=tokens).blocks == 0
    with client.get(namespace, tokens=tokens) as lease:
        assert lease.blocks == 0
    with client.put(namespace, b"") as put:
        assert len(put.blocks) == 0
    assert put.stored == 0


@pytest.mark.parametrize("hashes", [bytes(31), bytes(33)])
def test_malformed_hashes_are_the_callers_error(client: Client, namespace: Namespace, hashes: bytes) -> None:
    with pytest.raises(errors.InvalidArgument):
        client.lookup(namespace, hashes)
    with pytest.raises(errors.InvalidArgument), client.get(namespace, hashes):
        pass
    with pytest.raises(errors.InvalidArgument), client.put(namespace, hashes):
        pass


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 1e12, -1, "soon"])
def test_a_time_that_nobody_can_wait_is_the_callers_error(client: Client, namespace: Namespace, timeout_s: float) -> None:
    with pytest.raises(errors.InvalidArgument, match="give 0 to 3600 seconds"), client.get(namespace, b"", timeout_s=timeout_s):
        pass


@pytest.mark.parametrize("keep", [Keep("window", -5), Keep("window", 2**40), Keep("\ud800")])
def test_what_a_namespace_cannot_keep_is_the_callers_error(client: Client, keep: Keep) -> None:
    with pytest.raises(errors.InvalidArgument, match="keep's"):
        client.open_namespace(IDENTITY, GEOMETRY, keep=keep)
    with pytest.raises(errors.InvalidArgument, match="shard has half of a surrogate pair"):
        client.open_namespace(IDENTITY, GEOMETRY, "\udfff")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"guarantee_bytes": -1}, "guarantee_bytes is -1; give"),
        ({"limit_bytes": 2**70}, "limit_bytes is"),
        ({"limit_bytes": 0.5}, "whole number"),
        ({"name": "\ud800"}, "name has half"),
        ({"name": 3}, "name is 3"),
    ],
)
def test_a_session_that_cannot_be_asked_for_is_the_callers_error(given: dict[str, Any], says: str, shared: DaemonProcess) -> None:
    with pytest.raises(errors.InvalidArgument, match=says):
        KVClient(shared.address, **given)


def test_more_blocks_than_a_call_takes_are_refused_with_the_limit(client: Client, namespace: Namespace) -> None:
    with pytest.raises(errors.LimitExceeded, match="8192"):
        client.lookup(namespace, bytes(32 * 8193))


def test_hashes_or_tokens_must_be_given(client: Client, namespace: Namespace) -> None:
    with pytest.raises(errors.InvalidArgument, match="one of them"):
        client.lookup(namespace)
    with pytest.raises(errors.InvalidArgument, match="one of them"):
        client.lookup(namespace, chain(1, 1), tokens=[1])


def test_a_closed_client_says_so(shared: DaemonProcess, client: Client, namespace: Namespace) -> None:
    client.close()
    client.close()
    with pytest.raises(errors.SessionEnded):
        client.lookup(namespace, chain(1, 1))


def test_a_daemon_that_is_not_there_is_unavailable_soon(tmp_path: Path) -> None:
    with KVClient(str(tmp_path / "none.sock")) as client, pytest.raises(errors.Unavailable, match="kvstore serve"):
        client.open_namespace(IDENTITY, GEOMETRY)


def test_many_threads_share_one_client(shared: DaemonProcess) -> None:
    wrong: list[str] = []

    def work(client: KVClient, namespace: Namespace, seed: int) -> None:
        for step in range(10):
            hashes = chain(1000 + seed * 100 + step, 4)
            with client.put(namespace, hashes) as put:
                for block in put.blocks:
                    block.write(pattern(block.hash))
            with client.get(namespace, hashes) as lease:
                if lease.blocks != 4 or not right(lease.views, hashes):
                    wrong.append(f"{seed}/{step}")

    with KVClient(shared.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        threads = [threading.Thread(target=work, args=(client, namespace, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
