"""The GPUs that a daemon keeps blocks on: found, their memory taken and offered, the dram arena pinned for them; or why there are none."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from kvstore.cache.state import extent_bytes_for
from kvstore.config import Settings, format_bytes
from kvstore.daemon.pools import GpuPool, core_of
from kvstore.errors import ConfigError
from kvstore.geometry import UNIT_BYTES
from kvstore.tiers import hbm
from kvstore.tiers.base import Health, HealthState
from kvstore.tiers.hbm import Absent, HbmOptions, HbmTier
from kvstore.tiers.hbm_pool import TooLittleMemory
from kvstore.tiers.hbm_socket import PoolSocket
from kvstore.tiers.pinned import PinnedArena

log = logging.getLogger(__name__)


@dataclass
class HbmParts:
    """What there is of GPU memory: one tier a GPU, and where each is offered. `absent`: why there is none though it was asked for."""

    tiers: list[HbmTier] = field(default_factory=list)
    sockets: list[PoolSocket] = field(default_factory=list)
    pinned: PinnedArena | None = None
    absent: str = ""

    @property
    def notes(self) -> list[str]:
        """What is not as asked for."""
        return [text for text in (self.absent, self.pinned.note if self.pinned else "") if text]

    def pools(self, settings: Settings) -> Iterator[GpuPool]:
        """A cache core for each."""
        for number, (tier, socket) in enumerate(zip(self.tiers, self.sockets, strict=True), start=1):
            core = core_of(tier, settings.eviction, secrets.randbits(63), settings.session.max_sessions)
            yield GpuPool(number, tier, socket.path, core)

    def health(self) -> dict[str, Health]:
        """Every pool's; of `hbm` where there is none though it was asked for."""
        if self.absent:
            return {"hbm": Health(HealthState.DEGRADED, self.absent)}
        return {tier.label: self._health(tier.health()) for tier in self.tiers}

    def probes(self) -> dict[str, Callable[[], None]]:
        """How to see whether a pool that is not well works again."""
        return {tier.label: partial(_probe, tier) for tier in self.tiers}

    def close(self) -> None:
        """Offer nothing more, unpin the arena, give the memory back. No copy is in flight. Idempotent."""
        self.stop_offering()
        if self.pinned is not None:
            self.pinned.close()
        for tier in self.tiers:
            tier.close()
        self.pinned, self.tiers = None, []

    def stop_offering(self) -> None:
        """No more clients get the memory. Idempotent."""
        for socket in self.sockets:
            socket.close()
        self.sockets = []

    def _health(self, health: Health) -> Health:
        if health.state is HealthState.OK and self.pinned is not None and self.pinned.note:
            return Health(HealthState.DEGRADED, self.pinned.note)
        return health


def open_hbm(settings: Settings, arena: memoryview, survivors: int) -> HbmParts:
    """Take the memory. Without a driver there is none. Raises ConfigError where a GPU has less free than asked for, or is not there.

    Where processes of the last run (`survivors`) live, too little is no error: they may have the last daemon's pools mapped until they have
    attached to this one.
    """
    if not settings.hbm.bytes:
        return HbmParts()
    driver = hbm.find_driver()
    if isinstance(driver, Absent):
        return HbmParts(absent=f"hbm: no blocks in GPU memory, since {driver.reason}; they are kept in host memory and below")
    if not driver.devices():
        return HbmParts(absent="hbm: no blocks in GPU memory, since the driver sees no GPU; check CUDA_VISIBLE_DEVICES")
    parts = HbmParts()
    try:
        for device in settings.hbm.numbers(driver.devices()):
            log.info("hbm: taking %s on GPU %d", format_bytes(settings.hbm.bytes), device)
            parts.tiers.append(HbmTier(driver, HbmOptions(device, _capacity(settings.hbm.bytes))))
            parts.sockets.append(PoolSocket(parts.tiers[-1].pool, Path(f"{settings.listen}.hbm-{device}")))
        parts.pinned = PinnedArena(driver, parts.tiers[0].pool.device, np.frombuffer(arena, np.uint8))
    except TooLittleMemory as error:
        parts.close()
        if not survivors:
            raise
        why = f"{error}; {survivors} processes of the last run may still have its GPU memory: restart the daemon once they have let it go"
        return HbmParts(absent=why)
    except BaseException:
        parts.close()
        raise
    return parts


def _capacity(size_bytes: int) -> int:
    """Whole extents."""
    extent_bytes = extent_bytes_for(size_bytes)
    if size_bytes < extent_bytes:
        raise ConfigError(f"hbm: {format_bytes(size_bytes)} asked, one extent is {format_bytes(extent_bytes)}; set a larger --hbm")
    return size_bytes // extent_bytes * extent_bytes


def _probe(tier: HbmTier) -> None:
    """A copy of one unit, there and back; health shows what came of it."""
    scratch = memoryview(bytearray(UNIT_BYTES))
    try:
        tier.read(0, [scratch])
    except Exception as error:  # noqa: BLE001 — a probe's edge: what is wrong stands in the tier's health
        log.debug("%s: a probe failed: %s", tier.label, error)
