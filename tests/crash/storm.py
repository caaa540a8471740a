"""The storm: load, `kill -9` of the daemon and of clients at random moments, a start on the same directory, a close look; and again.

After each start: everything that the daemon had said to be on disk is found; every block that can be read has its own bytes; nothing
that was cleared is back; the classes of each tier add up. When all clients are gone nothing is held any more.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import IDENTITY
from tests.crash.crowd import Crowd
from tests.crash.keys import GEOMETRIES, bytes_of
from tests.crash.promises import Block, Watch

CLIENTS = 3  # processes: more than the cores of a small machine, so that they are interrupted anywhere
LOAD_S = (0.02, 0.8)  # seconds from readiness to the kill: from the first request to a full disk queue
STARTUP_S = (0.02, 0.5)  # seconds from the process's start to a kill while it starts
COME_BACK_S = 10.0  # seconds for clients to be at work again: grpc tries once a second at the latest, and the machine may stand still
GONE_S = 20.0  # seconds for the slots of dead processes to be free: it takes a fraction of one, and the machine may stand still
OLD_BLOCKS_READ = 300  # blocks promised in earlier rounds that are read again after each start
BATCH_BLOCKS = 64  # blocks in one lease of the close look: 1 MiB of a small memory
CLEAR_AT = 0.6  # of the disk: cleared then, so that nothing is ever evicted from it and every promise stands
TRANSIENT = ("reserved", "filling", "doomed", "orphaned")  # classes in which nothing stays when nobody is attached
BAD_WORDS = ("Traceback", "unexpected", "please report", "rule of the cache", "corrupt block")


@dataclass
class Tally:
    """What happened. `faults` must be empty."""

    kills: int = 0
    kills_while_starting: int = 0
    client_kills: int = 0
    promises_checked: int = 0
    blocks_read: int = 0
    blocks_cleared: int = 0
    leak_checks: int = 0
    slowest_start_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    clients: Counter[str] = field(default_factory=Counter)


class Storm:
    """One daemon directory, and what is known of it. Use `run`."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.tally = Tally()
        self._chance = random.Random(seed)
        self._daemon = DaemonProcess(directory, dram="16MiB", nvme_bytes="256MiB")
        self._crowd = Crowd(self._daemon.address, CLIENTS)
        self._promised: set[Block] = set()
        self._cleared: set[Block] = set()

    def run(self, kills: int, look_every: int = 5) -> Tally:
        """So many kills of the daemon, with a look at what is left when all clients are gone after each `look_every` of them."""
        try:
            self._start()
            while self.tally.kills < kills and not self.tally.faults:
                self._round()
                if self.tally.kills % look_every == 0 or self.tally.kills == kills:
                    self._look_for_leaks()
        finally:
            self._crowd.kill_all()
            self.tally.client_kills = self._crowd.kills
            self.tally.faults += self._crowd.faults
            self.tally.clients = self._crowd.counts
            self.tally.faults += [line for line in self._daemon.log().splitlines() if any(word in line for word in BAD_WORDS)]
            self._daemon.close()
        return self.tally

    # ---- one round

    def _round(self) -> None:
        self._crowd.go_on(self.tally.kills)
        self._crowd.fill()
        with Watch(self._daemon.address) as watch:
            if self._chance.random() < 0.7:  # else in the middle of their coming back
                self._crowd.wait_for_writes(COME_BACK_S)
            kill_client_after_s, load_s = self._chance.uniform(*LOAD_S), self._chance.uniform(*LOAD_S)
            if kill_client_after_s < load_s:
                time.sleep(kill_client_after_s)
                self._crowd.kill()
                load_s -= kill_client_after_s
            time.sleep(load_s)
            self._daemon.kill9()
            watch.end()
        self.tally.kills += 1
        self.tally.faults += watch.faults
        fresh = watch.on_disk - self._promised
        self._promised |= fresh
        if self._chance.random() < 0.2:
            self._die_while_starting()
        self._start()
        self._examine(fresh)

    def _start(self) -> None:
        started_at = time.monotonic()
        self._daemon.start()
        self.tally.slowest_start_s = max(self.tally.slowest_start_s, time.monotonic() - started_at)

    def _die_while_starting(self) -> None:
        """A kill before it is ready, or just after."""

        def kill() -> None:
            with contextlib.suppress(RuntimeError, ProcessLookupError):  # it has not begun yet
                os.kill(self._daemon.pid, signal.SIGKILL)

        timer = threading.Timer(self._chance.uniform(*STARTUP_S), kill)
        timer.start()
        try:
            self._daemon.start()
        except RuntimeError:
            self.tally.kills_while_starting += 1
        timer.cancel()
        timer.join()
        self._daemon.kill9()

    # ---- the close look

    def _examine(self, fresh: set[Block]) -> None:
        with Watch(self._daemon.address) as watch, KVClient(self._daemon.address, name="examiner") as client:
            lost, back = self._promised - watch.found, self._cleared & watch.found
            self.tally.promises_checked += len(self._promised)
            self._say(f"{len(lost)} of {len(self._promised)} blocks that were on disk are lost", len(lost))
            self._say(f"{len(back)} blocks that were cleared are back", len(back))
            self._promised |= watch.found
            old = sorted(self._promised - fresh)
            self._read(client, sorted(fresh) + self._chance.sample(old, min(len(old), OLD_BLOCKS_READ)))
            self._conserved(client)

    def _read(self, client: KVClient, blocks: list[Block]) -> None:
        """Every one of these can be leased, and has its own bytes."""
        for namespace in _namespaces(client):
            mine = [block_hash for digest, block_hash in blocks if digest == namespace.digest]
            for start in range(0, len(mine), BATCH_BLOCKS):
                keys = mine[start : start + BATCH_BLOCKS]
                while keys:
                    keys = keys[self._read_some(client, namespace, keys) :]

    def _read_some(self, client: KVClient, namespace: Namespace, keys: list[bytes]) -> int:
        size_bytes = namespace.geometry.block_bytes
        ends_at = time.monotonic() + GONE_S
        while True:
            with client.get(namespace, b"".join(keys)) as lease:
                pairs = zip(keys, lease.views, strict=False)
                wrong = [key.hex() for key, view in pairs if not np.array_equal(view, bytes_of(key, size_bytes))]
                self._say(f"wrong bytes in {wrong}", len(wrong))
                if lease.blocks or time.monotonic() > ends_at:  # others hold much of the memory now and then
                    self._say(f"{len(keys)} blocks on disk cannot be read", not lease.blocks)
                    self.tally.blocks_read += lease.blocks
                    return lease.blocks or len(keys)

    def _conserved(self, client: KVClient) -> None:
        stats = client.stats()
        for tier in stats.tiers:
            total = sum(tier.class_bytes.values())
            self._say(f"{tier.tier}: classes add up to {total} of {tier.capacity_bytes}", total != tier.capacity_bytes)
            self._say(f"{tier.tier}: {tier.health}: {tier.health_reason}", tier.health != "ok")
        self._say("a rule of the cache is broken", stats.counters["rules_broken"])

    def _look_for_leaks(self) -> None:
        """Without clients nothing is held; and when the disk is full enough, it is cleared for good."""
        self._crowd.kill_all()
        self.tally.leak_checks += 1
        with KVClient(self._daemon.address, name="auditor") as client:
            ends_at = time.monotonic() + GONE_S
            while (left := _held(client)) and time.monotonic() < ends_at:
                time.sleep(0.02)
            self._say(f"left behind by dead clients: {left}", len(left))
            self._conserved(client)
            nvme = next(tier for tier in client.stats().tiers if tier.tier == "nvme")
            if nvme.class_bytes["live"] > CLEAR_AT * nvme.capacity_bytes or self.tally.leak_checks == 1:
                namespaces = _namespaces(client)
                with Watch(self._daemon.address) as watch:
                    self._cleared = self._promised | watch.on_disk
                self.tally.blocks_cleared += sum(client.clear(namespace).blocks for namespace in namespaces)
                self._promised.clear()

    def _say(self, fault: str, amount: float) -> None:
        if amount:
            self.tally.faults.append(f"after kill {self.tally.kills}: {fault}")


def _namespaces(client: KVClient) -> list[Namespace]:
    return [client.open_namespace(IDENTITY, geometry) for geometry in GEOMETRIES]


def _held(client: KVClient) -> dict[str, int]:
    """What is held by anybody but this client, which holds nothing."""
    stats = client.stats()
    found = {f"{tier.tier} {name}": tier.class_bytes[name] for tier in stats.tiers for name in TRANSIENT}
    found |= {f"{tier.tier} held": tier.held_bytes for tier in stats.tiers}
    found["sessions"] = len(stats.sessions)
    return {name: amount for name, amount in found.items() if amount}


