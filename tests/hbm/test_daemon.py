"""Blocks in a GPU's memory, from commit to eviction: shared between processes, copied down, found by who has no GPU, cleared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvstore import errors
from kvstore.cli.main import main
from kvstore.clients import requests
from kvstore.clients.answers import Failed
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.pools import PoolTerms
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.fake_gpu_daemon import GpuDaemon
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern, right
from tests.cases.figures import all_on_disk, eventually, tier
from tests.daemon.stream import Stream
from tests.hbm.user import GpuUser, UserProcess

POOL_BLOCKS = 1024  # blocks of 16 KiB in 16 MiB
FRAME_S = 5.0  # seconds for an answer


@pytest.fixture(scope="module")
def daemon() -> Iterator[GpuDaemon]:
    with GpuDaemon(gpus=2) as running:
        yield running
        assert "please report" not in running.log()


@pytest.fixture
def client(daemon: GpuDaemon) -> Iterator[KVClient]:
    with KVClient(daemon.address) as each:
        yield each
        each.clear()


@pytest.fixture
def namespace(client: KVClient) -> Namespace:
    return client.open_namespace(IDENTITY, GEOMETRY)


@pytest.fixture
def user(daemon: GpuDaemon, namespace: Namespace) -> Iterator[GpuUser]:
    each = GpuUser(daemon.address)
    yield each
    each.close()
    with KVClient(daemon.address) as client:
        assert eventually(lambda: tier(client, "hbm:0").held_bytes == 0)


def counter(client: KVClient, name: str) -> int:
    """One of the daemon's counters."""
    return client.stats().counters.get(name, 0)


def test_two_processes_share_blocks_in_gpu_memory(daemon: GpuDaemon, client: KVClient) -> None:
    with UserProcess(daemon.address) as writer, UserProcess(daemon.address) as reader:
        assert writer.ask("put", 1, 1, 20) == {"stored": 20}
        assert reader.ask("get", 1, 1, 30) == 20
        reader.ask("close")
        writer.ask("close")


def test_a_block_goes_down_to_memory_and_disk_and_a_client_without_gpu_reads_it(
    client: KVClient, namespace: Namespace, user: GpuUser
) -> None:
    user.put(1, 2, 40)
    assert all_on_disk(client, 40)
    found = client.lookup(namespace, chain(2, 41))
    assert (found.blocks, set(found.tiers)) == (40, {"hbm"})
    with client.get(namespace, chain(2, 40)) as lease:
        assert lease.blocks == 40
        assert right(lease.views, chain(2, 40))
    assert tier(client, "hbm:0").blocks == 40
    assert counter(client, "dropped_from_hbm") == 0


def test_blocks_that_came_from_memory_are_not_copied_back(client: KVClient, namespace: Namespace, user: GpuUser) -> None:
    hashes, before = chain(3, 8), counter(client, "demoted_from_hbm")
    with client.put(namespace, hashes) as put:
        for block in put.blocks:
            block.write(pattern(block.hash))
    user.put(1, 3, 8)
    user.put(2, 4, 1)
    assert eventually(lambda: counter(client, "demoted_from_hbm") == before + 1)


def test_a_full_pool_evicts_what_nobody_holds_and_memory_still_has_it(client: KVClient, namespace: Namespace, user: GpuUser) -> None:
    for seed in range(10, 14):
        assert user.put(seed, seed, 400)["stored"] == 400 * (seed - 9)
        user.release(seed)
        assert eventually(lambda seed=seed: client.lookup(namespace, chain(seed, 400)).blocks == 400)  # type: ignore[misc]
        assert all_on_disk(client, 400 * (seed - 9))
    assert counter(client, "evicted_hbm") >= 4 * 400 - POOL_BLOCKS
    assert user.get(20, 10, 400) < 400
    assert user.get_in_dram(20, 10, 400) == 400


def test_a_cleared_namespace_is_found_nowhere_and_held_blocks_stay_readable(client: KVClient, namespace: Namespace, user: GpuUser) -> None:
    user.put(1, 5, 12)
    cleared = client.clear(namespace)
    assert (cleared.blocks, cleared.hbm_bytes) == (12, 12 * GEOMETRY.slot_bytes)
    assert client.lookup(namespace, chain(5, 12)).blocks == 0
    assert user.get(2, 5, 12) == 0
    assert tier(client, "hbm:0").class_bytes["doomed"] == 12 * GEOMETRY.slot_bytes
    user.release(1)
    assert eventually(lambda: tier(client, "hbm:0").held_bytes == 0)
    assert client.lookup(namespace, chain(5, 12)).blocks == 0


def test_each_gpu_has_a_pool_of_its_own(daemon: GpuDaemon, client: KVClient, namespace: Namespace, user: GpuUser) -> None:
    other = GpuUser(daemon.address, "gpu-1")
    user.put(1, 6, 5)
    assert other.get(1, 6, 5) == 0
    assert other.put(2, 6, 5) == {"stored": 5}
    assert (tier(client, "hbm:0").blocks, tier(client, "hbm:1").blocks) == (5, 5)
    assert client.clear(namespace).blocks == 5
    other.close()


def test_watchers_hear_of_a_block_in_gpu_memory_while_any_has_it(daemon: GpuDaemon, client: KVClient, namespace: Namespace) -> None:
    user, other = GpuUser(daemon.address), GpuUser(daemon.address, "gpu-1")
    watch = client.watch(namespace)
    assert next(watch).kind == "snapshot_end"
    user.put(1, 7, 2)
    other.put(1, 7, 2)
    user.release(1)
    client.clear(namespace)
    seen = []
    while (event := next(watch)).kind != "cleared":
        if event.tier == "hbm":
            seen.append((event.kind, event.hashes))
    assert seen[0] == ("stored", chain(7, 2))
    kinds = [kind for kind, _ in seen]
    assert kinds == sorted(kinds, reverse=True), "in a second pool, perhaps; then gone, from both"
    assert {key for kind, hashes in seen for key in each_hash(hashes) if kind == "removed"} == set(each_hash(chain(7, 2)))
    user.put(3, 8, 3)
    there = []
    for event in client.watch(namespace):
        if event.kind == "snapshot_end":
            break
        there += each_hash(event.hashes) if event.tier == "hbm" else []
    assert sorted(there) == sorted(each_hash(chain(8, 3)))
    user.close()
    other.close()


def test_pins_count_each_block_once(client: KVClient, namespace: Namespace, user: GpuUser) -> None:
    user.put(1, 9, 6)
    assert all_on_disk(client, 6)
    assert client.pin(namespace, chain(9, 6)) == 6
    assert client.unpin(namespace, chain(9, 6)) == 6


def test_a_gpu_without_a_pool_gets_no_offer(daemon: GpuDaemon) -> None:
    user = GpuUser(daemon.address, terms=[PoolTerms("gpu-7")], map_it=False)
    assert user.session.pools == {}
    user.session.close()


def test_a_guarantee_larger_than_the_pool_is_refused(daemon: GpuDaemon) -> None:
    with pytest.raises(errors.ResourceExhausted, match="ask for less"):
        GpuUser(daemon.address, terms=[PoolTerms("gpu-0", guarantee_bytes=1 << 40)])


def test_what_a_pool_cannot_do_is_refused_with_the_reason(user: GpuUser) -> None:
    link, _, namespace = user.session._live
    ops = [
        requests.reserve(1, namespace, count=1, pool=9),
        requests.release(1, pool=3),
        *(requests.reserve(number, namespace, count=1, pool=9) for number in range(10, 20)),  # neighbours that are done as one elsewhere
    ]
    answers = link.ask(ops, FRAME_S)
    texts = [str(answer.error) for answer in answers if isinstance(answer, Failed) and isinstance(answer.error, errors.InvalidArgument)]
    assert len(texts) == len(ops)
    assert all("was not offered to this session" in text for text in texts)


def test_slots_of_a_client_that_is_killed_are_free_again(daemon: GpuDaemon, client: KVClient) -> None:
    with UserProcess(daemon.address) as doomed:
        assert doomed.ask("put", 1, 30, 10) == {"stored": 10}
        assert doomed.ask("reserve", 20) == 20
        assert tier(client, "hbm:0").held_bytes == 30 * GEOMETRY.slot_bytes
        doomed.kill()
        assert eventually(lambda: tier(client, "hbm:0").held_bytes == 0)
    assert tier(client, "hbm:0").class_bytes["live"] == 10 * GEOMETRY.slot_bytes


def _hello(*terms: pb.PoolTerms, **more: object) -> pb.Hello:
    return pb.Hello(client="by hand", maps_arena=True, pools=terms, **more)  # type: ignore[arg-type]


GPU_0 = pb.PoolTerms(uuid="gpu-0")


@pytest.mark.parametrize("named_again", [True, False])
def test_a_resumed_session_has_what_the_old_one_held_in_a_pool(
    daemon: GpuDaemon, client: KVClient, namespace: Namespace, named_again: bool
) -> None:
    held = 3 * GEOMETRY.slot_bytes
    with Stream(daemon.address) as old:
        welcome = old.attach(_hello(GPU_0))
        old.ask(requests.reserve(1, namespace.id, count=3, pool=welcome.pools[0].pool))
        old.cut()
        assert eventually(lambda: any(each.session == welcome.session and each.ended for each in client.stats().sessions))
        resume = {"resume_session": welcome.session, "resume_token": welcome.resume_token}
        with Stream(daemon.address) as wrong:  # a refusal in one pool must leave the old holds where they are, in all
            wrong.send(hello=_hello(pb.PoolTerms(uuid="gpu-0", guarantee_bytes=1 << 40), **resume))
            assert wrong.receive().ended.code == "RESOURCE_EXHAUSTED"
        assert tier(client, "hbm:0").held_bytes == held
        with Stream(daemon.address) as again:
            assert len(again.attach(_hello(*[GPU_0] * named_again, **resume)).pools) == named_again
            old.unlock()
            if named_again:
                assert again.ask(requests.abandon(1, pool=1))[0].done.count == 3
                assert tier(client, "hbm:0").held_bytes == 0
    assert eventually(lambda: tier(client, "hbm:0").held_bytes == 0)


@pytest.mark.parametrize(
    ("hello", "text"),
    [
        (pb.Hello(pools=[GPU_0]), "pools without maps_arena"),
        (_hello(GPU_0, GPU_0), "names a GPU twice"),
        (_hello(*(pb.PoolTerms(uuid=f"gpu-{number}") for number in range(100))), "100 GPUs in a Hello, the most is 64"),
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(daemon: GpuDaemon, hello: pb.Hello, text: str) -> None:
    descriptors = Path(f"/proc/{daemon.pid}/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(12):
        with Stream(daemon.address) as stream:
            stream.send(hello=hello)
            assert text in stream.receive().ended.text
    assert eventually(lambda: len(list(descriptors.iterdir())) < before + 12), "each leaves nothing behind"


def test_stats_and_metrics_name_the_pools(
    daemon: GpuDaemon, client: KVClient, user: GpuUser, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "(hbm:0 16.0 MiB, hbm:1 16.0 MiB, dram" in daemon.ready
    assert [each.tier for each in client.stats().tiers] == ["hbm:0", "hbm:1", "dram", "nvme"]
    for each in client.stats().tiers:
        assert (each.health, sum(each.class_bytes.values())) == ("ok", each.capacity_bytes)
    assert user.reserve(3) == 3
    mine = next(each for each in client.stats().sessions if each.client == "user of gpu-0" and not each.ended)
    assert (mine.held_bytes, mine.hbm_held_bytes) == (0, 3 * GEOMETRY.slot_bytes)
    assert main(["stats", "--address", daemon.address]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"hbm:0 +16.0 MiB", shown)
    assert re.search(r" 48.0 KiB  user of gpu-0", shown)
    with urlopen(f"http://{daemon.metrics_address}/metrics") as answer:
        assert 'kvstore_tier_held_bytes{tier="hbm:0"} 49152.0' in answer.read().decode()
