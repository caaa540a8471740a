"""GPU memory that is not there, too small, lost, or whose copies fail; a daemon that is killed; blocks that are found wrong elsewhere."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.blocks import Prompt
from kvstore.clients.blocksession import BlockSession
from kvstore.clients.channel import target
from kvstore.clients.client import KVClient
from kvstore.clients.pools import PoolTerms
from kvstore.config import HbmSettings, Settings
from kvstore.daemon.hbm_parts import HbmParts, open_hbm
from kvstore.geometry import UNIT_BYTES
from kvstore.hashing import fingerprint
from kvstore.testing.daemon import DaemonProcess
from kvstore.testing.fake_cuda import FakeCuda
from kvstore.testing.fake_gpu_daemon import GPU_BYTES, GpuDaemon
from kvstore.tiers import hbm
from kvstore.tiers.base import HealthState
from kvstore.tiers.hbm import Absent, find_driver
from tests.blocks import BLOCK_TOKENS, GEOMETRY, IDENTITY, chain, each_hash, pattern, right, tokens_of
from tests.cases.figures import all_on_disk, eventually, tier
from tests.hbm.user import WAIT_S, GpuUser


def attached_again(user: GpuUser) -> None:
    """Wait until the session of a user whose daemon was restarted is a new one."""
    for _ in range(200):
        try:
            user.session.acquire(999, chain(999, 1), 1.0)
            return
        except errors.Unavailable:
            time.sleep(0.1)
    raise AssertionError("no new session")


@pytest.mark.parametrize("descriptors", [True, False])
def test_after_a_kill_the_next_daemon_has_another_pool_and_blocks_come_back_from_disk(tmp_path: Path, descriptors: bool) -> None:
    with GpuDaemon(tmp_path, descriptors=descriptors) as daemon:
        user = GpuUser(daemon.address)
        before, old = user.pool, user.memory
        assert user.put(1, 1, 20) == {"stored": 20}
        held = user.session.acquire(2, chain(1, 20), WAIT_S, pool=before)
        with KVClient(daemon.address) as client:
            assert all_on_disk(client, 20)
            assert tier(client, "hbm:0").health == ("ok" if descriptors else "degraded")
        daemon.restart()
        attached_again(user)
        if descriptors:  # what it has mapped stays its own, until it lets go
            assert all(user.read(unit, key) for unit, key in zip(held.units.tolist(), each_hash(chain(1, 20)), strict=True))
        else:
            with pytest.raises(errors.Unavailable, match="not mapped any more"):
                old.view(0, UNIT_BYTES)
        with pytest.raises(errors.Unavailable, match="another by now"):
            user.session.reserve(1, pool=before)
        user.session.release(2, pool=before)
        user.map()
        assert user.pool != before
        assert user.get(3, 1, 20) == 0
        assert user.get_in_dram(4, 1, 20) == 20
        assert user.put(5, 1, 20)["stored"] == 40
        assert user.get(6, 1, 20) == 20
        old.close()
        user.close()


def test_more_than_a_gpu_has_is_refused_at_the_start() -> None:
    daemon = GpuDaemon(gpu_bytes=(512 << 20) + (8 << 20))
    with pytest.raises(RuntimeError, match=r"hbm: 16.0 MiB asked of GPU 0 \(fake\), 520.0 MiB are free"), daemon:
        pass


def test_where_processes_of_the_last_run_may_have_the_memory_the_next_daemon_starts_without(tmp_path: Path) -> None:
    with GpuDaemon(tmp_path) as daemon:
        user = GpuUser(daemon.address)
        user.put(1, 1, 5)
        with KVClient(daemon.address) as client:
            assert all_on_disk(client, 5)
        daemon.environment[GPU_BYTES] = str(514 << 20)
        daemon.restart()
        attached_again(user)
        assert user.session.pools == {}
        assert user.get_in_dram(2, 1, 5) == 5
        with KVClient(daemon.address) as client:
            assert "hbm: 16.0 MiB asked of GPU 0 (fake), 514.0 MiB are free" in tier(client, "hbm").health_reason
        user.close()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Two GPUs in this process; after the test nothing is left of what was taken there."""
    fake = FakeCuda(devices=2)
    monkeypatch.setattr(hbm, "find_driver", lambda: fake)
    yield fake
    assert fake.violations == []
    assert fake.leaks() == []


def opened(directory: Path, size_bytes: int = 16 << 20, devices: str = "all") -> HbmParts:
    """What a daemon with these settings takes."""
    return open_hbm(Settings(listen=str(directory / "s"), hbm=HbmSettings(size_bytes, devices)), memoryview(mmap.mmap(-1, 1 << 20)), 0)


@pytest.mark.parametrize(
    ("size_bytes", "devices", "text"),
    [
        (16 << 20, "1,7", "hbm: GPU 7 is not there, the driver sees 2"),
        (16 << 20, "first", "names no GPUs; write all, or numbers as in 0,1"),
        (1 << 20, "all", "one extent is 2.0 MiB; set a larger --hbm"),
    ],
)
def test_settings_that_make_no_sense_are_refused(driver: FakeCuda, tmp_path: Path, size_bytes: int, devices: str, text: str) -> None:
    with pytest.raises(errors.ConfigError, match=text):
        opened(tmp_path, size_bytes, devices)


def test_an_arena_that_cannot_be_pinned_shows_and_costs_no_more(driver: FakeCuda, tmp_path: Path) -> None:
    driver.fail("pin", 2)
    parts = opened(tmp_path, devices="1,0")
    assert [tier.label for tier in parts.tiers] == ["hbm:1", "hbm:0"]
    assert "raise the memlock limit" in parts.notes[0]
    assert {(state.state, state.reason) for state in parts.health().values()} == {(HealthState.DEGRADED, parts.notes[0])}
    parts.close()
    opened(tmp_path).close()


def test_without_a_driver_the_daemon_starts_and_says_why_there_is_no_gpu_memory() -> None:
    if not isinstance(find_driver(), Absent):
        pytest.skip("this machine has a driver")
    with DaemonProcess(flags=["--hbm", "16MiB"], nvme=False) as daemon, KVClient(daemon.address) as client:
        found = tier(client, "hbm")
        assert (found.capacity_bytes, found.health) == (0, "degraded")
        assert "no blocks in GPU memory" in found.health_reason
        assert found.health_reason in daemon.log()
        user = GpuUser(daemon.address, map_it=False)
        assert user.session.pools == {}
        user.session.close()


def test_a_copy_that_fails_is_tried_again_and_shows() -> None:
    with GpuDaemon() as daemon, KVClient(daemon.address) as client:
        user = GpuUser(daemon.address)
        daemon.fail_copy()
        user.put(1, 1, 1)
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        assert all_on_disk(client, 1)
        with client.get(namespace, chain(1, 1)) as lease:
            assert right(lease.views, chain(1, 1))
        assert client.stats().counters["failed_from_hbm"] == 1
        assert eventually(lambda: "hbm:0 is degraded: hbm: a read failed: copy: as the test asked" in daemon.log())
        assert eventually(lambda: tier(client, "hbm:0").health == "ok")
        user.close()


def test_without_its_gpu_the_daemon_goes_on() -> None:
    with GpuDaemon(gpus=2) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        user, other = GpuUser(daemon.address), GpuUser(daemon.address, "gpu-1")
        user.put(1, 1, 5)
        assert all_on_disk(client, 5)
        daemon.lose_gpu()
        user.put(2, 2, 5)
        assert eventually(lambda: tier(client, "hbm:0").health == "failed")
        assert eventually(lambda: client.lookup(namespace, chain(2, 5)).blocks == 0)
        assert "restart the daemon" in tier(client, "hbm:0").health_reason
        found = client.lookup(namespace, chain(1, 5))
        assert (found.blocks, set(found.tiers)) == (5, {"dram"})
        with pytest.raises(errors.Unavailable, match="its GPU failed"):
            user.get(3, 1, 5)
        with pytest.raises(errors.Unavailable, match="its GPU failed"):
            user.reserve(1)
        assert user.get_in_dram(4, 1, 5) == 5
        assert other.put(1, 3, 5)["stored"] == 5
        assert all_on_disk(client, 10)
        user.release(1, 2)
        late = GpuUser(daemon.address, map_it=False)
        assert set(late.session.pools) == {"gpu-1"}
        for each in (late, user, other):
            each.session.close()
        assert daemon.stop() == 0


def test_a_gpu_that_hangs_shows_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    with GpuDaemon(tmp_path, flags=["--acquire-timeout-s", "0.5", "--shutdown-s", "0.2"]) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        user = GpuUser(daemon.address)
        user.put(1, 1, 5)
        assert all_on_disk(client, 5)
        daemon.hang_gpu()
        user.put(2, 2, 5)
        assert eventually(lambda: "a copy to host memory has been under way" in tier(client, "hbm:0").health_reason)
        assert (user.get(3, 2, 5), user.get_in_dram(4, 2, 5), user.get_in_dram(5, 1, 5)) == (5, 0, 5)
        with client.put(namespace, chain(3, 2)) as put:
            for block in put.blocks:
                block.write(pattern(block.hash))
        assert all_on_disk(client, 7)
        user.close()
        client.close()
        assert daemon.stop() == 0
        assert "a GPU did not answer in time" in daemon.log()
        daemon.start()
        assert daemon.log().count("clean_stop=True") == 2
        with KVClient(daemon.address) as late:
            assert late.lookup(late.open_namespace(IDENTITY, GEOMETRY), chain(1, 5)).blocks == 5


def test_a_block_that_is_found_wrong_in_memory_goes_from_gpu_memory_too() -> None:
    with GpuDaemon(flags=["--verify", "read"]) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        user = GpuUser(daemon.address)
        user.put(1, 1, 3)
        user.release(1)
        assert all_on_disk(client, 3)
        slots = user.session.acquire(2, chain(1, 3), WAIT_S)
        user.session.arena[int(slots.units[1]) * UNIT_BYTES] ^= 1
        user.session.release(2)
        assert client.lookup(namespace, chain(1, 3)).blocks == 3
        assert user.get_in_dram(3, 1, 3) == 1
        assert client.lookup(namespace, chain(1, 3)).blocks == 1
        assert user.get(4, 1, 3) == 1
        user.close()


def test_token_ids_go_down_with_their_blocks() -> None:
    with GpuDaemon(nvme=False) as daemon, KVClient(daemon.address) as client:
        request = requests.open_namespace(IDENTITY, GEOMETRY, "", "", requests.KEEP_ALL, tails=True)
        session = BlockSession(target(daemon.address), GEOMETRY, request, requests.hello("t", 0, 0, [PoolTerms("gpu-0")]))
        pool, tokens, root = session.pools["gpu-0"], tokens_of(1, 2, 0), fingerprint(IDENTITY)
        session.commit(1, session.reserve(2, pool=pool), chain(1, 2), root, tokens, pool=pool)
        assert eventually(lambda: tier(client, "dram").blocks == 2)
        prompt = Prompt([*tokens[: BLOCK_TOKENS + 5], 1, 2, 3], root)
        for where in (None, pool):
            tail = session.acquire(2, chain(1, 1), WAIT_S, prompt, pool=where).tail
            assert tail is not None
            assert tail.tokens == 5
        session.close()


def test_what_waits_is_copied_down_before_an_orderly_end(tmp_path: Path) -> None:
    with GpuDaemon(tmp_path, hbm="32MiB") as daemon:
        user = GpuUser(daemon.address)
        assert user.put(1, 1, 300)["stored"] == 300
        user.close()
        assert daemon.stop() == 0
        daemon.start()
        with KVClient(daemon.address) as client:
            assert client.lookup(client.open_namespace(IDENTITY, GEOMETRY), chain(1, 300)).blocks == 300
