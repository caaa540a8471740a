"""Puts the daemon together: the tiers, the cache with what the disk holds and what survivors keep, and the transfers between them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import logging
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.cache.core import Cache
from kvstore.cache.messages import Recovered
from kvstore.cache.state import CacheSizes, extent_bytes_for
from kvstore.config import Settings, format_bytes
from kvstore.daemon.copier import Copier
from kvstore.daemon.hbm_parts import HbmParts, open_hbm
from kvstore.daemon.hub import Hub
from kvstore.daemon.mover import MoverLimits, Pulls
from kvstore.daemon.namespaces import KnownNamespace
from kvstore.daemon.transfers import Transfers
from kvstore.geometry import UNIT_BYTES
from kvstore.native.library import library
from kvstore.tiers.base import Health, HealthState
from kvstore.tiers.dram import DramOptions, DramTier
from kvstore.tiers.nvme import Durable, NvmeOptions, NvmeTier
from kvstore.tiers.nvme_records import LoadedRecords
from kvstore.tiers.session_files import SessionFile

REFUSED_PAUSE_S = 1.0  # seconds until a disk that refused a namespace is asked again: as long as after a block's failed write
REMEMBER_S = 2.0  # seconds that a client waits for the disk to take its namespace: a disk that is well takes milliseconds

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """All that a running daemon is made of, below its service."""

    hub: Hub
    dram: DramTier
    nvme: NvmeTier | None
    hbm: HbmParts
    stuck_s: float  # a transfer that is under way for longer than anybody waits shows as degraded
    _refused: dict[bytes, asyncio.Task[None]] = field(default_factory=dict)  # namespaces that the disk is asked again to remember

    async def remember(self, namespace: KnownNamespace) -> None:
        """Return when the namespace's facts are on disk: from then on its blocks may be.

        Where the disk refuses them, or does not answer, the namespace lives in memory alone until it takes them: its blocks' writes
        fail, and are counted.
        """
        if self.nvme is None or namespace.digest in self.nvme.namespaces or namespace.digest in self._refused:
            return
        attempt = asyncio.create_task(self._tried(self.nvme, namespace))
        self._refused[namespace.digest] = asyncio.create_task(self._remember(self.nvme, namespace, attempt))
        await asyncio.wait({attempt}, timeout=REMEMBER_S)
        if namespace.digest in self.nvme.namespaces:
            return
        why = str(attempt.result() if attempt.done() else f"no answer within {REMEMBER_S:g} s; check the disk")
        log.error("nvme: namespace %s is not remembered, its blocks stay in memory: %s", namespace.digest.hex()[:12], why)

    async def _tried(self, nvme: NvmeTier, namespace: KnownNamespace) -> errors.EnvironmentFault | None:
        try:
            await nvme.add_namespace(namespace.digest, namespace.stored_facts())
        except errors.EnvironmentFault as error:
            return error
        return None

    async def _remember(self, nvme: NvmeTier, namespace: KnownNamespace, attempt: asyncio.Task[errors.EnvironmentFault | None]) -> None:
        """Until the disk has taken it."""
        refused = await attempt
        while refused is not None:
            await asyncio.sleep(REFUSED_PAUSE_S)
            refused = await self._tried(nvme, namespace)
        del self._refused[namespace.digest]

    def stop_remembering(self) -> None:
        """What the disk has refused so far is not tried again."""
        for task in self._refused.values():
            task.cancel()

    def health(self) -> dict[str, Health]:
        """Every tier's."""
        states = {**self._gpus(), "dram": self.dram.health()}
        if self.nvme is not None:
            states["nvme"] = self.nvme.health()
            if self.hub.transfers is not None and (stuck_s := self.hub.transfers.longest_out_s()) > self.stuck_s:
                states["nvme"] = Health(HealthState.DEGRADED, f"nvme: a transfer has been under way for {stuck_s:.0f} s; check the disk")
        return states

    def _gpus(self) -> dict[str, Health]:
        """Every pool's; a copy that is under way for longer than anybody waits shows as degraded."""
        states, demotion = self.hbm.health(), self.hub.demotion
        for pool in self.hub.pools.all.values() if self.hub.pools is not None and demotion is not None else ():
            if (stuck_s := demotion.longest_out_s(pool.number) if demotion is not None else 0.0) > self.stuck_s:
                why = f"{pool.name}: a copy to host memory has been under way for {stuck_s:.0f} s; see nvidia-smi"
                states[pool.name] = Health(HealthState.DEGRADED, why)
        return states


async def build(settings: Settings) -> Parts:
    """Take all memory and disk space, and recover. Raises ConfigError and FormatError, each with what to do."""
    epoch = secrets.token_hex(8)
    nvme = await _open_nvme(settings)
    try:
        dram = await asyncio.to_thread(_open_dram, settings, epoch)
    except BaseException:
        if nvme is not None:
            nvme.close()
        raise
    hbm = HbmParts()
    try:
        survivors = dram.surviving_sessions()
        hbm = await asyncio.to_thread(open_hbm, settings, dram.memory, len(survivors))
        hub = Hub(Cache(_sizes(settings, dram, nvme)), dram, epoch)
        if hbm.tiers:
            hub.use_pools(hbm.pools(settings))
        _keep_survivors(hub, dram, survivors)
        hub.transfers = _transfers(settings, hub, dram, nvme)
        if nvme is not None:
            await _recover(hub, nvme)
        hub.cache.dram_ready(dram.touched_units)
        hub.settle()
    except BaseException:
        hbm.close()
        dram.close()
        if nvme is not None:
            nvme.close()
        raise
    for note in (*dram.notes, *hbm.notes, *(nvme.notes if nvme else ())):
        log.warning("%s", note)
    if library() is None:
        log.info("index: searched with numpy, for want of the compiled library; install again with a C compiler (cc) for a faster one")
    return Parts(hub, dram, nvme, hbm, settings.acquire_timeout_s)


async def _open_nvme(settings: Settings) -> NvmeTier | None:
    if not settings.nvme.path:
        return None
    log.info("nvme: taking %s in %s", format_bytes(settings.nvme.bytes), settings.nvme.path)
    extent_units = extent_bytes_for(settings.nvme.bytes) // UNIT_BYTES
    durable = Durable(settings.nvme.durable)
    return await NvmeTier.open(NvmeOptions(Path(settings.nvme.path), settings.nvme.bytes, extent_units, durable))


def _open_dram(settings: Settings, epoch: str) -> DramTier:
    log.info("dram: taking %s in %s", format_bytes(settings.dram.bytes), settings.dram.dir)
    extent_bytes = settings.dram.extent_bytes or extent_bytes_for(settings.dram.bytes)
    name = hashlib.sha256(os.fsencode(os.path.realpath(settings.listen))).hexdigest()[:12]  # one arena a socket
    dram, extent_units = settings.dram, extent_bytes // UNIT_BYTES
    return DramTier(DramOptions(Path(dram.dir), name, dram.bytes, extent_units, epoch, dram.prefault, dram.huge_pages))


def _sizes(settings: Settings, dram: DramTier, nvme: NvmeTier | None) -> CacheSizes:
    return CacheSizes(
        dram_bytes=dram.capacity_bytes,
        nvme_bytes=nvme.capacity_bytes if nvme else 0,
        dram_extent_bytes=dram.extent_units * UNIT_BYTES,
        nvme_extent_bytes=nvme.extent_units * UNIT_BYTES if nvme else 0,
        index_blocks=settings.index.blocks,
        nvme_write=settings.nvme.write,
        eviction=settings.eviction,
        verify=settings.verify,
        seed=secrets.randbits(63),
        silence_s=settings.session.silence_s,
        max_sessions=settings.session.max_sessions,
    )


def _transfers(settings: Settings, hub: Hub, dram: DramTier, nvme: NvmeTier | None) -> Transfers:
    facts, disk = hub.namespaces.facts, settings.nvme
    copier = Copier(dram.memory, nvme, facts)
    extent_units = nvme.extent_units if nvme else dram.extent_units
    limits = MoverLimits(disk.threads + 2, disk.queue_depth, extent_units, disk.write_bytes_per_s, settings.scrub_bytes_per_s)
    pulls = Pulls(hub.next_writes, hub.cache.next_sums, hub.cache.next_scrubs)
    return Transfers(limits, facts, copier, pulls, hub.transferred)


def _keep_survivors(hub: Hub, dram: DramTier, survivors: list[SessionFile]) -> None:
    """Processes of an earlier daemon may still have this arena mapped: what they hold stays out of use."""
    hub.sessions.survivors = survivors
    units = [file.marked_units() for file in hub.sessions.survivors]
    if units:
        kept = hub.cache.survivors(np.unique(np.concatenate(units)), dram.left_slot_units)
        log.info("%d processes of the last run are still attached; %d slots stay theirs", len(units), kept)


async def _recover(hub: Hub, nvme: NvmeTier) -> None:
    started_at = time.monotonic()
    log.info("nvme: reading the records of %s in %s", format_bytes(nvme.capacity_bytes), nvme.directory.path)
    loaded = await asyncio.to_thread(nvme.load)
    with contextlib.suppress(errors.EnvironmentFault):  # health shows it; next time, then
        await nvme.forget_unused(loaded)
    ids = np.zeros(1 + max((each.number for each in nvme.namespaces.values()), default=0), np.int32)
    for stored in nvme.namespaces.values():
        try:
            ids[stored.number] = hub.namespaces.reopen(stored.facts).id
        except errors.KVStoreError as error:
            log.error("nvme: namespace %s is left out, its blocks are freed: %s", stored.digest.hex()[:12], error)
    count = hub.cache.recover(_recovered(loaded, ids, nvme))
    _give_memory_back()
    torn, misplaced = len(loaded.torn_units), len(loaded.misplaced_units)
    log.info(
        "nvme: %d blocks recovered in %.2f s",
        count,
        time.monotonic() - started_at,
        extra={"clean_stop": not nvme.suspect, "torn": torn, "misplaced": misplaced, "quarantined": len(loaded.quarantined_units)},
    )


def _give_memory_back() -> None:
    """Recovery needs several times what it leaves; the C library keeps that for itself unless it is asked."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)


def _recovered(loaded: LoadedRecords, ids: NDArray[np.int32], nvme: NvmeTier) -> Recovered:
    """What the cache is told. Newest blocks come last, so that they are the most recent."""
    return Recovered(
        namespaces=ids[loaded.namespaces],
        hashes=loaded.hashes,
        parents=loaded.parents,
        units=loaded.units,
        generations=loaded.generations,
        checksums=loaded.checksums,
        suspect=nvme.suspect,
        quarantined_units=loaded.quarantined_units,
        extent_slot_units=nvme.extent_slot_units,
    )
