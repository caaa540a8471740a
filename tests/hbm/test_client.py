"""`get` and `put` in a GPU's memory, by clients with threads and on an event loop; and groups whose blocks lie there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore import errors
from kvstore.clients import gpus
from kvstore.clients.aio import AsyncKVClient
from kvstore.clients.answers import Slotted
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.lease import Lease
from kvstore.clients.requests import Keep
from kvstore.clients.session import Granting
from kvstore.geometry import Geometry
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.fake_cuda import FakeCuda
from kvstore.testing.fake_gpu_daemon import GpuDaemon
from tests.blocks import BLOCK_TOKENS, GEOMETRY, IDENTITY, chain, each_hash, pattern
from tests.cases.figures import all_on_disk, eventually, tier
from tests.hbm.user import GpuUser

HASH_BYTES = 32


@pytest.fixture(scope="module")
def daemon() -> Iterator[GpuDaemon]:
    with GpuDaemon(gpus=2) as running:
        yield running
        assert "please report" not in running.log()


@pytest.fixture
def driver() -> Iterator[FakeCuda]:
    """One that sees a GPU more than the daemon; after the test nothing is mapped, and no rule was broken."""
    fake = FakeCuda(devices=3)
    yield fake
    assert fake.violations == []
    assert fake.leaks() == []


@pytest.fixture
def client(daemon: GpuDaemon, driver: FakeCuda) -> Iterator[KVClient]:
    with KVClient(daemon.address, gpus=[0, 1, 2], driver=driver) as each:
        yield each
        assert eventually(lambda: all(tier(each, name).held_bytes == 0 for name in ("hbm:0", "hbm:1")))
        each.clear()


@pytest.fixture
def namespace(client: KVClient) -> Namespace:
    return client.open_namespace(IDENTITY, GEOMETRY)


def put(client: KVClient, namespace: Namespace, hashes: bytes, parent: bytes | None = None, pool: int | None = 0) -> int:
    """Store blocks with their own bytes; how many are there now."""
    with client.put(namespace, hashes, parent, pool=pool) as made:
        made.write_all([pattern(key) for key in each_hash(hashes)])
    return made.stored


def read(lease: Lease) -> list[NDArray[np.uint8]]:
    """Copies of a lease's blocks."""
    found = [np.zeros(GEOMETRY.block_bytes, np.uint8) for _ in range(lease.blocks)]
    assert lease.copy_into(found) == len(found)
    return found


def right(found: list[NDArray[np.uint8]], hashes: bytes) -> bool:
    return all(np.array_equal(each, pattern(key)) for each, key in zip(found, each_hash(hashes), strict=True))


def test_what_is_put_in_a_gpu_is_leased_there_and_comes_down_for_everybody(client: KVClient, namespace: Namespace) -> None:
    hashes = chain(1, 6)
    assert put(client, namespace, hashes) == 6
    assert set(client.lookup(namespace, hashes).tiers) == {"hbm"}
    with client.get(namespace, hashes, pool=0) as lease:
        assert (lease.blocks, len(lease.device_views), len(lease.views)) == (6, 6, 0)
        assert lease.device_views[2].__cuda_array_interface__["shape"] == (GEOMETRY.block_bytes,)
        assert right(read(lease), hashes)
    assert all_on_disk(client, 6)
    with client.get(namespace, hashes) as lease:
        assert (len(lease.device_views), right(read(lease), hashes)) == (0, True)


def test_what_the_gpu_has_comes_first_and_host_memory_has_the_rest(client: KVClient, namespace: Namespace, driver: FakeCuda) -> None:
    hashes = chain(2, 7)
    cut = 3 * HASH_BYTES
    put(client, namespace, hashes[:cut])
    assert put(client, namespace, hashes[cut : 5 * HASH_BYTES], hashes[cut - HASH_BYTES : cut], pool=None) == 2
    with client.get(namespace, hashes, pool=0) as lease:
        assert (lease.blocks, len(lease.device_views), len(lease.views)) == (5, 3, 2)
        assert right(read(lease), hashes[: 5 * HASH_BYTES])
        assert right(list(lease.views), hashes[cut : 5 * HASH_BYTES])
        # Both kinds of blocks may go to the GPU's memory, as into an engine's own tensors.
        with client.put(namespace, chain(3, 4), pool=0) as other:
            lease.copy_into([block.device_view for block in other.blocks])
            with client.get(namespace, chain(3, 4), pool=0) as nothing:
                assert nothing.blocks == 0, "blocks that nobody said are done"
        assert other.stored == 0
    with client.get(namespace, hashes, pool=1) as lease:
        assert len(lease.device_views) == 0, "another GPU's memory"


def test_blocks_are_filled_in_place_and_copied_from_gpu_to_gpu_memory(client: KVClient, namespace: Namespace) -> None:
    first, second = chain(4, 2), chain(5, 2)
    put(client, namespace, first)
    with client.get(namespace, first, pool=0) as lease, client.put(namespace, second, pool=0) as made:
        for block, source in zip(made.blocks, lease.device_views, strict=True):
            block.write(source)
        with pytest.raises(errors.InvalidArgument, match="fill its device_view"):
            made.blocks[0].view  # noqa: B018
    with client.get(namespace, second, pool=0) as lease:
        assert right(read(lease), first), "as it was told"
    with pytest.raises(errors.SessionEnded, match="inside the with block"):
        made.blocks[0].device_view  # noqa: B018


def test_a_put_that_fails_leaves_nothing(client: KVClient, namespace: Namespace) -> None:
    with contextlib.suppress(ZeroDivisionError), client.put(namespace, chain(6, 3), pool=0) as made:
        made.write_all([pattern(key) for key in each_hash(chain(6, 3))])
        raise ZeroDivisionError
    assert client.lookup(namespace, chain(6, 3)).blocks == 0
    with client.put(namespace, chain(6, 3), pool=0) as made:
        assert len(made.blocks) == 3, "the keys are free"


def test_a_copy_that_fails_is_an_error_and_nothing_is_stored(client: KVClient, namespace: Namespace, driver: FakeCuda) -> None:
    driver.fail("copy", 1, after=1)
    with pytest.raises(errors.Unavailable, match="as the test asked"):
        put(client, namespace, chain(7, 3))
    assert driver.in_flight() == 0
    assert client.lookup(namespace, chain(7, 3)).blocks == 0


def test_a_buffer_of_another_size_is_refused(client: KVClient, namespace: Namespace) -> None:
    put(client, namespace, chain(8, 1))
    with client.get(namespace, chain(8, 1), pool=0) as lease, client.put(namespace, chain(9, 1), pool=0) as made:
        for source in (b"short", np.zeros(GEOMETRY.block_bytes - 1, np.uint8)):
            with pytest.raises(errors.InvalidArgument, match="a block 16384"):
                made.blocks[0].write(source)
        with pytest.raises(errors.InvalidArgument, match="read-only"):
            lease.copy_into([bytes(GEOMETRY.block_bytes)])


def test_a_window_in_a_gpu_has_blocks_without_bytes_before_it(client: KVClient) -> None:
    windowed = client.open_namespace(IDENTITY, GEOMETRY, kv_group="window", keep=Keep("window", 2 * BLOCK_TOKENS))
    hashes = chain(10, 6)
    put(client, windowed, hashes)
    with client.get(windowed, hashes, pool=0) as lease:
        sizes = [view.__cuda_array_interface__["shape"][0] for view in lease.device_views]
        assert sizes == [0] * 4 + [GEOMETRY.block_bytes] * 2
        found = [np.full(GEOMETRY.block_bytes, 7, np.uint8) for _ in range(6)]
        lease.copy_into(found)
    assert right(found[4:], hashes[4 * HASH_BYTES :])
    assert all((each == 7).all() for each in found[:4])


@pytest.mark.parametrize("act", ["get", "put"])
def test_where_there_is_no_pool_it_is_said_so(client: KVClient, namespace: Namespace, act: str) -> None:
    for gpu, error, text in [(3, errors.InvalidArgument, r"make it with gpus=\[3\]"), (2, errors.ConfigError, "keeps no blocks on GPU 2")]:
        with pytest.raises(error, match=text), getattr(client, act)(namespace, chain(11, 1), pool=gpu):
            pass


def test_a_machine_without_a_driver_or_such_a_gpu_is_told(
    daemon: GpuDaemon, driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> FakeCuda:
        raise errors.ConfigError("no NVIDIA driver; install it")

    monkeypatch.setattr(gpus, "LibCuda", absent)
    with pytest.raises(errors.ConfigError, match="no NVIDIA driver"):
        KVClient(daemon.address, gpus=[0])
    with pytest.raises(errors.ConfigError, match="GPU 3 is not there"):
        KVClient(daemon.address, gpus=[3], driver=driver)


def test_the_same_on_an_event_loop(daemon: GpuDaemon, driver: FakeCuda, client: KVClient, namespace: Namespace) -> None:
    hashes = chain(12, 4)

    async def both() -> None:
        async with AsyncKVClient(daemon.address, gpus=[1], driver=driver) as mine:
            theirs = await mine.open_namespace(IDENTITY, GEOMETRY)
            async with mine.put(theirs, hashes[: 3 * HASH_BYTES], pool=1) as made:
                made.write_all([pattern(key) for key in each_hash(hashes)[:3]])
            assert made.stored == 3
            put(client, namespace, hashes[3 * HASH_BYTES :], hashes[2 * HASH_BYTES : 3 * HASH_BYTES], pool=None)
            async with mine.get(theirs, hashes, pool=1) as lease:
                assert (len(lease.device_views), len(lease.views)) == (3, 1)
                assert right(read(lease), hashes)
            with pytest.raises(errors.InvalidArgument, match="does not use the memory of GPU 0"):
                async with mine.get(theirs, hashes, pool=0):
                    pass

    asyncio.run(both())


LARGE = Geometry("mha", 32, 8, 128, 128, "bfloat16", 2 * BLOCK_TOKENS)  # 4 MiB a block: twice an extent of a small pool


def join(user: GpuUser, *namespaces: Namespace) -> None:
    """Become a member of the group."""
    session = user.session._live[1].session
    request = pb.JoinGroupRequest(session=session.id, group="model", epoch=session.epoch)
    request.namespace_ids.extend(each.id for each in namespaces)
    user.session._stub.JoinGroup(request, timeout=20.0)


def acquire(user: GpuUser, lease: int, hashes: bytes) -> Granting:
    """Lease a prefix for the group, in the pool."""
    asked = pb.Acquire(lease=lease, group="model", hashes=hashes, timeout_s=1.0)
    return user.session._live[0].take(pb.Op(acquire=asked, pool=user.pool.number), 20.0)


def test_a_group_leases_in_a_pool_what_every_member_has_there(daemon: GpuDaemon, client: KVClient, namespace: Namespace) -> None:
    windowed = client.open_namespace(IDENTITY, GEOMETRY, kv_group="window", keep=Keep("window", 2 * BLOCK_TOKENS))
    hashes = chain(20, 6)
    put(client, namespace, hashes)
    put(client, windowed, hashes[: 5 * HASH_BYTES])
    users = [GpuUser(daemon.address) for _ in range(2)]
    assert "JoinGroup" in str(acquire(users[0], 1, hashes).error)
    for user in users:
        join(user, namespace, windowed)
    found = acquire(users[0], 2, hashes)
    assert found.units.shape == (2, 5)
    assert found.generations[1].astype(bool).tolist() == [False] * 3 + [True] * 2
    for member in range(2):
        for unit, generation, key in zip(found.units[member].tolist(), found.generations[member], each_hash(hashes), strict=False):
            assert not generation or users[0].read(unit, key)
    claim = pb.Op(claim=pb.Claim(lease=2, group="model", namespace_id=namespace.id), pool=users[1].pool.number)
    answer = users[1].session._live[0].ask([claim], 20.0)[0]
    assert isinstance(answer, Slotted)
    assert answer.units.tolist() == found.units[0].tolist()
    for user in users:
        user.close()


def test_a_group_whose_member_is_too_large_for_the_pool_finds_nothing_there(driver: FakeCuda) -> None:
    with GpuDaemon(dram="128MiB", nvme=False) as daemon, KVClient(daemon.address, gpus=[0], driver=driver) as client:
        namespace, large = client.open_namespace(IDENTITY, GEOMETRY), client.open_namespace(IDENTITY, LARGE)
        hashes, user = chain(21, 2), GpuUser(daemon.address)
        assert put(client, namespace, hashes) == 2
        join(user, namespace, large)
        assert acquire(user, 1, hashes).blocks == 0
        with (
            pytest.raises(errors.LimitExceeded, match=r"4194304 bytes exceeds an extent of hbm:0, 2097152"),
            client.put(large, hashes, pool=0),
        ):
            pass
        user.close()


@pytest.mark.parametrize("descriptors", [True, False])
def test_after_a_kill_the_next_pool_is_mapped_and_what_was_leased_stays_while_it_can(tmp_path: Path, descriptors: bool) -> None:
    driver = FakeCuda()
    with GpuDaemon(tmp_path, descriptors=descriptors) as daemon, KVClient(daemon.address, gpus=[0], driver=driver) as client:
        namespace, hashes = client.open_namespace(IDENTITY, GEOMETRY), chain(1, 4)
        put(client, namespace, hashes)
        assert all_on_disk(client, 4)
        with client.get(namespace, hashes, pool=0) as lease:
            device_view = lease.device_views[0]
            daemon.restart()
            assert eventually(lambda: lease.attached is not None and lease.attached.error is not None)
            with pytest.raises((errors.SessionEnded, errors.StaleEpoch)):
                lease.device_views  # noqa: B018
            with client.get(namespace, hashes, pool=0) as again:
                assert (len(again.device_views), len(again.views)) == (0, 4)
                assert right(read(again), hashes)
            put(client, namespace, chain(2, 2))
            if descriptors:  # the old memory is mapped until its lease ends
                assert _bytes_of(driver, device_view.address) == pattern(hashes[:HASH_BYTES]).tobytes()
        with client.get(namespace, chain(2, 2), pool=0) as lease:
            assert right(read(lease), chain(2, 2))
    assert driver.leaks() == []
    assert driver.violations == []


def _bytes_of(driver: FakeCuda, address: int) -> bytes:
    found = np.zeros(GEOMETRY.block_bytes, np.uint8)
    stream, event = driver.stream(0), driver.event(0)
    driver.copy(0, stream, found.ctypes.data, address, found.nbytes)
    driver.record(0, stream, event)
    driver.wait(0, event)
    driver.close_event(0, event)
    driver.close_stream(0, stream)
    return found.tobytes()
