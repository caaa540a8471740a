"""Blocks brought to GPU memory layer by layer, under compute that reads them: on a driver where only events order anything."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.clients.promotion import Lift, Promotion, Route
from kvstore.errors import InvalidArgument
from kvstore.geometry import Geometry, Quant
from kvstore.kernels.driver import CudaError
from kvstore.testing.fake_cuda import GRANULARITY_BYTES, FakeCuda
from kvstore.testing.fake_cuda_parts import POISON, Violation

GEOMETRY = Geometry("mha", 4, 2, 64, 64, "bfloat16", 16)
LAYER_BYTES = GEOMETRY.block_bytes // 4
REFUSED = 801  # status: CUDA_ERROR_NOT_SUPPORTED


class Setting:
    """A GPU with a pool, three blocks in dram, and a stream that computes: it copies what it reads to host memory."""

    def __init__(self, geometry: Geometry = GEOMETRY) -> None:
        self.driver = FakeCuda()
        self.geometry = geometry
        rng = np.random.default_rng(0)
        self.dram = rng.integers(0, 256, 3 * geometry.slot_bytes, np.uint8)
        self.pool_bytes = -(-3 * geometry.slot_bytes // GRANULARITY_BYTES) * GRANULARITY_BYTES
        self.pool = self.driver.allocate(0, self.pool_bytes)
        self.route = Route(geometry, self.dram.ctypes.data, self.pool)
        order = (2, 0, 1)
        self.lifts = [Lift(block * geometry.slot_bytes, place * geometry.slot_bytes) for block, place in enumerate(order)]
        self.compute = self.driver.stream(0)

    def read(self, lift: Lift, layer: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """What a kernel on the compute stream finds of one layer of a block, once it has run."""
        out = np.zeros(LAYER_BYTES, np.uint8)
        event = self.driver.event(0)
        self.driver.copy(0, self.compute, out.ctypes.data, self.pool + lift.hbm_bytes + layer * LAYER_BYTES, LAYER_BYTES)
        self.driver.record(0, self.compute, event)
        self.driver.wait(0, event)
        self.driver.close_event(0, event)
        return out

    def wanted(self, lift: Lift, layer: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        start = lift.dram_bytes + layer * LAYER_BYTES
        return self.dram[start : start + LAYER_BYTES]


@pytest.fixture
def setting() -> Iterator[Setting]:
    found = Setting()
    yield found
    found.driver.close_stream(0, found.compute)
    found.driver.free(0, found.pool)
    assert found.driver.violations == []
    assert found.driver.leaks() == []


def test_compute_that_follows_a_layer_finds_it_and_the_rest_is_still_on_its_way(setting: Setting) -> None:
    promotion = Promotion(setting.driver, 0, setting.route, setting.lifts)
    for layer in range(4):
        promotion.follow(layer, setting.compute)
        for lift in setting.lifts:
            assert (setting.read(lift, layer) == setting.wanted(lift, layer)).all()
        assert setting.driver.in_flight() == 3 * (3 - layer), "later layers were waited for"
    promotion.wait()
    assert promotion.done()
    promotion.close()


def test_compute_that_does_not_follow_finds_nothing(setting: Setting) -> None:
    """That the order matters here at all."""
    promotion = Promotion(setting.driver, 0, setting.route, setting.lifts)
    assert (setting.read(setting.lifts[0], 0) == POISON).all()
    promotion.close()


def test_it_can_be_polled_without_waiting(setting: Setting) -> None:
    promotion = Promotion(setting.driver, 0, setting.route, setting.lifts)
    polls = 0
    while not promotion.done():
        polls += 1
    assert polls > 4
    assert setting.driver.calls["wait"] == 0
    promotion.close()


def test_closing_it_waits_for_what_is_on_its_way(setting: Setting) -> None:
    Promotion(setting.driver, 0, setting.route, setting.lifts).close()
    assert setting.driver.in_flight() == 0


def test_memory_given_back_before_it_is_done_is_noticed() -> None:
    setting = Setting()
    Promotion(setting.driver, 0, setting.route, setting.lifts)
    with pytest.raises(Violation):
        setting.driver.free(0, setting.pool)


@pytest.mark.parametrize(("call", "after"), [("copy", 0), ("copy", 5), ("event", 0), ("event", 2), ("record", 1)])
def test_a_promotion_that_cannot_be_queued_leaves_nothing_in_flight(setting: Setting, call: str, after: int) -> None:
    setting.driver.fail(call, REFUSED, after)
    with pytest.raises(CudaError):
        Promotion(setting.driver, 0, setting.route, setting.lifts)
    assert setting.driver.in_flight() == 0


def test_a_lost_gpu_ends_it_with_an_error() -> None:
    setting = Setting()
    promotion = Promotion(setting.driver, 0, setting.route, setting.lifts)
    setting.driver.lose(0)
    with pytest.raises(CudaError):
        promotion.wait()
    promotion.close()


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry("mha", 3, 1, 8, 8, "int8", 16, quant=Quant("symmetric", "head")),
        Geometry("mha", 3, 1, 8, 8, "uint8", 16, format="engine", opaque_block_bytes=5000),
    ],
)
def test_blocks_without_layers_of_their_own_come_in_one_piece(geometry: Geometry) -> None:
    setting = Setting(geometry)
    promotion = Promotion(setting.driver, 0, setting.route, setting.lifts)
    assert setting.driver.in_flight() == 3
    promotion.wait()
    promotion.close()


def test_nothing_to_promote_is_no_error(setting: Setting) -> None:
    promotion = Promotion(setting.driver, 0, setting.route, [])
    promotion.follow(3, setting.compute)
    promotion.wait()
    promotion.close()
    with pytest.raises(InvalidArgument, match="layer 4 of 4"):
        promotion.follow(4, setting.compute)
