"""Blocks in GPU memory: what is given back and when, what a failure leaves, on a driver that checks its own rules."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.errors import ConfigError, InvalidArgument, Unavailable
from kvstore.geometry import UNIT_BYTES
from kvstore.kernels.driver import OUT_OF_MEMORY, CudaError
from kvstore.testing.fake_cuda import ALREADY_PINNED, GRANULARITY_BYTES, LOST, FakeCuda
from kvstore.testing.tier_contract import aligned, filled, pattern
from kvstore.tiers import hbm
from kvstore.tiers.base import HealthState
from kvstore.tiers.hbm import Absent, HbmOptions, HbmTier, find_driver
from kvstore.tiers.pinned import PinnedArena

CAPACITY_BYTES = 64 * UNIT_BYTES
REFUSED = 801  # status: CUDA_ERROR_NOT_SUPPORTED


@pytest.fixture
def driver() -> Iterator[FakeCuda]:
    """Two GPUs; after the test no rule was broken."""
    fake = FakeCuda(devices=2)
    yield fake
    assert fake.violations == []


def _tier(driver: FakeCuda, device: int = 0, streams: int = 4) -> HbmTier:
    return HbmTier(driver, HbmOptions(device, CAPACITY_BYTES, streams))


def test_a_machine_without_a_driver_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> FakeCuda:
        raise ConfigError("no NVIDIA driver (libcuda.so.1: cannot open); install it to keep blocks in GPU memory")

    monkeypatch.setattr(hbm, "LibCuda", absent)
    found = find_driver()
    assert isinstance(found, Absent)
    assert "install it" in found.reason


def test_each_gpu_has_a_pool_of_its_own(driver: FakeCuda) -> None:
    one, other = _tier(driver, 0), _tier(driver, 1)
    one.write(0, [filled(1, UNIT_BYTES)])
    other.write(0, [filled(2, UNIT_BYTES)])
    target = aligned(UNIT_BYTES)
    one.read(0, [target])
    assert bytes(target) == pattern(1, UNIT_BYTES)
    assert one.pool.uuid != other.pool.uuid
    one.close()
    other.read(0, [target])
    assert bytes(target) == pattern(2, UNIT_BYTES)
    other.close()
    assert driver.leaks() == []


def test_a_gpu_that_is_not_there_is_refused(driver: FakeCuda) -> None:
    with pytest.raises(ConfigError, match="GPU 2 is not there, the driver sees 2"):
        _tier(driver, 2)


def test_more_than_is_free_is_refused_before_anything_is_taken(driver: FakeCuda) -> None:
    with pytest.raises(ConfigError, match=r"1\.0 GiB asked of GPU 0 \(fake\), 1\.0 GiB are free"):
        HbmTier(driver, HbmOptions(0, 1 << 30))
    assert driver.leaks() == []


@pytest.mark.parametrize("call", ["create", "map", "export_descriptor", "stream", "event"])
def test_memory_that_runs_out_on_the_way_leaves_nothing_behind(driver: FakeCuda, call: str) -> None:
    driver.fail(call, OUT_OF_MEMORY)
    with pytest.raises((ConfigError, CudaError)):
        _tier(driver)
    assert driver.leaks() == []


@pytest.mark.parametrize("call", ["create", "map", "export_descriptor"])
def test_where_descriptors_are_refused_plain_memory_is_shared(driver: FakeCuda, call: str) -> None:
    driver.fail(call, REFUSED)
    tier = _tier(driver)
    assert tier.pool.kind == "ipc"
    assert tier.health().state is HealthState.DEGRADED
    assert "clients lose it with the daemon" in tier.health().reason
    tier.write(0, [filled(1, UNIT_BYTES)])
    tier.close()
    assert driver.leaks() == []


def test_the_pool_is_whole_granules_and_the_tier_no_larger_than_asked(driver: FakeCuda) -> None:
    tier = HbmTier(driver, HbmOptions(0, UNIT_BYTES))
    assert tier.capacity_bytes == UNIT_BYTES
    assert tier.pool.size_bytes == GRANULARITY_BYTES
    with pytest.raises(InvalidArgument):
        tier.read(UNIT_BYTES, [aligned(UNIT_BYTES)])
    tier.close()


@pytest.mark.usefixtures("faults_pass_at_once")
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_copy_that_cannot_be_queued_waits_for_those_before_it(driver: FakeCuda, kind: str) -> None:
    tier = _tier(driver)
    buffers = [filled(key, UNIT_BYTES) for key in range(3)]
    driver.fail("copy", REFUSED, after=2)
    with pytest.raises(CudaError):
        getattr(tier, kind)(0, buffers)
    assert driver.in_flight() == 0, "a buffer was given back under a copy"
    assert tier.health().state is HealthState.DEGRADED
    assert f"a {kind} failed" in tier.health().reason
    getattr(tier, kind)(0, buffers)
    assert tier.health().state is HealthState.OK
    tier.close()
    assert driver.leaks() == []


def test_a_lost_gpu_fails_the_tier_and_says_so(driver: FakeCuda) -> None:
    tier, other = _tier(driver), _tier(driver, 1)
    driver.fail("wait", LOST)
    with pytest.raises(CudaError):
        tier.write(0, [filled(1, UNIT_BYTES)])
    driver.lose(0)
    assert tier.health().state is HealthState.FAILED
    assert "see nvidia-smi" in tier.health().reason
    calls = driver.calls["copy"]
    with pytest.raises(Unavailable, match="GPU 0 failed"):
        tier.read(0, [aligned(UNIT_BYTES)])
    assert driver.calls["copy"] == calls, "a lost GPU was used again"
    other.write(0, [filled(1, UNIT_BYTES)])
    tier.close()
    other.close()


def test_the_last_call_in_progress_gives_the_memory_back(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = _tier(driver)
    inside, go = threading.Event(), threading.Event()
    wait = driver.wait

    def slow(device: int, event: int) -> None:
        inside.set()
        assert go.wait(30)
        wait(device, event)

    monkeypatch.setattr(driver, "wait", slow)
    target = aligned(UNIT_BYTES)
    thread = threading.Thread(target=lambda: tier.read(0, [target]))
    thread.start()
    assert inside.wait(30)
    tier.close()
    assert driver.leaks() != [], "closed under a copy"
    go.set()
    thread.join(30)
    assert driver.leaks() == []


def test_no_more_copies_run_at_once_than_there_are_streams(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hbm, "WAIT_FOR_STREAM_S", 0.05)
    tier = _tier(driver, streams=1)
    inside, go = threading.Event(), threading.Event()
    wait = driver.wait

    def slow(device: int, event: int) -> None:
        inside.set()
        assert go.wait(30)
        wait(device, event)

    monkeypatch.setattr(driver, "wait", slow)
    thread = threading.Thread(target=lambda: tier.write(0, [filled(1, UNIT_BYTES)]))
    thread.start()
    assert inside.wait(30)
    with pytest.raises(Unavailable, match="has ended no copy for"):
        tier.write(0, [filled(2, UNIT_BYTES)])
    go.set()
    thread.join(30)
    tier.close()


def _arena(pages: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(aligned(pages * UNIT_BYTES), np.uint8)


def test_an_arena_is_pinned_in_chunks_and_given_back(driver: FakeCuda) -> None:
    pinned = PinnedArena(driver, 0, _arena(10), chunk_bytes=4 * UNIT_BYTES)
    assert pinned.pinned
    assert driver.leaks() == [f"pin of {units * UNIT_BYTES} bytes" for units in (4, 4, 2)]
    pinned.close()
    pinned.close()
    assert driver.leaks() == []


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_arena_that_cannot_be_pinned_whole_is_not_pinned_at_all(driver: FakeCuda, after: int) -> None:
    driver.fail("pin", OUT_OF_MEMORY, after=after)
    pinned = PinnedArena(driver, 0, _arena(10), chunk_bytes=4 * UNIT_BYTES)
    assert not pinned.pinned
    assert "raise the memlock limit" in pinned.note
    assert driver.leaks() == []


def test_memory_that_is_pinned_already_stays_as_it_was(driver: FakeCuda) -> None:
    arena = _arena(4)
    first = PinnedArena(driver, 0, arena)
    second = PinnedArena(driver, 0, arena)
    assert f"status {ALREADY_PINNED}" in second.note
    assert len(driver.leaks()) == 1
    first.close()


def test_only_whole_pages_are_pinned(driver: FakeCuda) -> None:
    for memory, chunk in ((_arena(2)[8:], UNIT_BYTES), (_arena(2)[:100], UNIT_BYTES), (_arena(2), 100), (_arena(2), 0)):
        with pytest.raises(InvalidArgument, match="only whole pages"):
            PinnedArena(driver, 0, memory, chunk_bytes=chunk)
