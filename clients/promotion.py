"""Blocks on their way from the dram arena to GPU memory, layer by layer, under the compute of the layers before.

The caller holds a lease on the blocks in dram, a reservation for the slots in hbm, and both until `wait` has returned. Each layer of all
blocks is copied, by the driver block by block or by a kernel in one launch, then an event recorded; the stream that computes follows the
event of a layer before it reads that layer.

    promotion = Promotion(driver, device, route, pairs)
    for layer in range(layers): promotion.follow(layer, compute_stream); ...queue the layer's attention...
    promotion.wait(); commit; promotion.close()
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidArgument
from kvstore.geometry import Geometry
from kvstore.kernels.driver import CudaDriver, CudaError


@dataclass(frozen=True)
class Route:
    """Where blocks of one geometry lie: the addresses of the dram arena's and the pool's first unit, as this process maps them."""

    geometry: Geometry
    dram_address: int
    hbm_address: int


@dataclass(frozen=True)
class Lift:
    """One block: its slot's offset in the dram arena, and that of the slot that it goes to."""

    dram_bytes: int
    hbm_bytes: int


# Queues the copy of the same bytes (first, how many) of all blocks.
Copy = Callable[[int, int], None]
# Makes one for a stream, or None where the driver is to copy.
Copier = Callable[[int], Copy | None]


class Promotion:
    """The copies of some blocks, queued on construction on a stream of their own. One thread uses it.

    `copier`: what copies in place of the driver; what it makes is kept until `close`.
    Raises CudaError where they cannot be queued: then all that had been queued has run, and nothing is left behind.
    """

    def __init__(self, driver: CudaDriver, device: int, route: Route, lifts: Sequence[Lift], copier: Copier | None = None) -> None:
        self._driver, self._device = driver, device
        self._events: list[int] = []
        self._stream = driver.stream(device)
        self._finished = False
        self._copy: Copy | None = None
        try:
            self._copy = copier(self._stream) if copier is not None else None
            for start, size in _layers(route.geometry):
                if self._copy is not None:
                    self._copy(start, size)
                else:
                    self._copy_each(route, lifts, start, size)
                self._record()
        except CudaError:
            with contextlib.suppress(CudaError):
                self._record()
                self.wait()
            self.close()
            raise

    def follow(self, layer: int, stream: int) -> None:
        """What is queued on `stream` from now on sees this layer, and those before it, in hbm. Does not wait."""
        if not 0 <= layer < len(self._events):
            raise InvalidArgument(f"layer {layer} of {len(self._events)}; blocks without layers of their own have one")
        self._driver.follow(self._device, stream, self._events[layer])

    def done(self) -> bool:
        """Whether all layers have arrived."""
        self._finished = self._finished or self._driver.done(self._device, self._events[-1])
        return self._finished

    def wait(self) -> None:
        """Sleep until all have: then the reservation may be committed, and the lease released. Raises CudaError for a failed copy."""
        self._driver.wait(self._device, self._events[-1])
        self._finished = True

    def close(self) -> None:
        """Destroy the stream and its events. Idempotent. What is on its way is waited for: its memory must outlive it."""
        if not self._stream:
            return
        if not self._finished and self._events:
            with contextlib.suppress(CudaError):  # a lost context runs nothing any more
                self.wait()
        stream, self._stream, self._copy = self._stream, 0, None
        with contextlib.suppress(CudaError):
            for event in self._events:
                self._driver.close_event(self._device, event)
            self._driver.close_stream(self._device, stream)

    def _copy_each(self, route: Route, lifts: Sequence[Lift], start: int, size: int) -> None:
        for lift in lifts:
            to, of = route.hbm_address + lift.hbm_bytes + start, route.dram_address + lift.dram_bytes + start
            self._driver.copy(self._device, self._stream, to, of, size)

    def _record(self) -> None:
        self._events.append(self._driver.event(self._device))
        self._driver.record(self._device, self._stream, self._events[-1])


def _layers(geometry: Geometry) -> list[tuple[int, int]]:
    """Start and size in bytes of each layer in a block: kv1 without scales by its layers, anything else in one piece."""
    if geometry.format != "kv1" or geometry.quant is not None:
        return [(0, geometry.block_bytes)]
    size, rest = divmod(geometry.block_bytes, geometry.layers)
    if rest:
        raise InvalidArgument(f"a block of {geometry.block_bytes} bytes is no whole number for each of {geometry.layers} layers")
    return [(layer * size, size) for layer in range(geometry.layers)]
