"""A daemon with little memory, and more blocks than it holds: what is not held there is pushed out."""

from __future__ import annotations

from pathlib import Path

from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, chain
from tests.cases.figures import nothing_held, settled, store, tier

SLOT_BYTES = GEOMETRY.slot_bytes
SLOTS = 512  # of 16 KiB in 8 MiB
PART = 64  # blocks of a chain, stored at once: far fewer than what nobody holds
SILENCE_S = 3.0  # seconds: longer than a busy machine keeps a living process waiting
SOON_S = 3.0  # seconds: within one a dead process's memory is free, on a machine that does nothing else


def small_daemon(directory: Path) -> DaemonProcess:
    """With 8 MiB of memory and 16 of disk; it gives a silent session up after three seconds."""
    flags = ["--session-silence-s", str(SILENCE_S), "--acquire-timeout-s", "2"]
    return DaemonProcess(directory, flags, dram="8MiB", nvme_bytes="16MiB")


def held_bytes(client: KVClient) -> int:
    """What leases, reservations, orphans and transfers keep of memory."""
    return tier(client, "dram").held_bytes


def free_soon(client: KVClient) -> bool:
    """Whether nothing is held of memory a moment from now, or sooner."""
    return nothing_held(client, SOON_S)


def press(client: KVClient, namespace: Namespace, rounds: int = 2) -> None:
    """Store more than the memory holds, in many chains, so that all that is not held is pushed out; down to the disk if need be."""
    for each in range(rounds):
        hashes = chain(1000 + each, SLOTS)
        for start in range(0, len(hashes), 32 * PART):
            assert store(client, namespace, hashes[start : start + 32 * PART]).stored == PART
        assert settled(client)
