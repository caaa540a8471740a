"""What each level of verification costs, all in one run: `python -m tests.daemon.verify_price`. Prints the table in docs/guarantees.md.

Ratios hold from machine to machine better than times do: every time stands beside what the same run needed without the check.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvstore.checksum import block_checksum
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.geometry import Geometry
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import IDENTITY, chain
from tests.cases.figures import all_on_disk, eventually, opaque

ROUNDS = 15  # rounds: the median of so many is what is shown
SIZES = {16 << 10: 2048, 256 << 10: 1024, 2 << 20: 256}  # bytes a block: blocks in the chain that is acquired
IDLE_S = 15.0  # seconds over which the idle daemon's own time is taken
DISK_BLOCKS, DISK_BLOCK_BYTES = 256, 1 << 20  # what the background check and fsck go through


def median_s(act: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The time it takes, without the first round."""
    times = []
    for _ in range(rounds + 1):
        began_at = time.perf_counter()
        act()
        times.append(time.perf_counter() - began_at)
    return statistics.median(times[1:])


def acquired_s(block_bytes: int, blocks: int, verify: str) -> float:
    """Acquire and release of a chain in memory."""
    geometry, hashes = opaque(block_bytes), chain(1, blocks)
    with DaemonProcess(None, ["--verify", verify], dram="1GiB", nvme=False) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, geometry)
        fill(client, namespace, hashes)

        def get() -> None:
            with client.get(namespace, hashes) as lease:
                if lease.blocks != blocks:
                    raise RuntimeError(f"{lease.blocks} of {blocks} blocks")

        return median_s(get)


def fill(client: KVClient, namespace: Namespace, hashes: bytes) -> None:
    """Store a chain of random bytes."""
    chance = np.random.default_rng(1)
    with client.put(namespace, hashes) as put:
        for block in put.blocks:
            block.write(chance.integers(0, 256, namespace.geometry.block_bytes, np.uint8))


def summed_s(block_bytes: int, blocks: int) -> float:
    """The checksums of as many bytes by one thread, without a daemon."""
    memory = memoryview(np.random.default_rng(1).bytes(block_bytes * blocks))

    def take() -> None:
        for block in range(blocks):
            block_checksum(bytes(32), bytes(32), memory[block * block_bytes : (block + 1) * block_bytes])

    return median_s(take)


def hits() -> None:
    """A hit in memory, with `verify = transfer` and with `read`."""
    print("| blocks | of | `transfer` | `read` | `read` / `transfer` | checksums alone, one thread | `read` / checksums |")
    print("|---|---|---|---|---|---|---|")
    for block_bytes, blocks in SIZES.items():
        plain, checked = (acquired_s(block_bytes, blocks, verify) for verify in ("transfer", "read"))
        alone = summed_s(block_bytes, blocks)
        row = f"{blocks:,} | {block_bytes >> 10:,} KiB | {plain * 1e3:.1f} ms | {checked * 1e3:.1f} ms | {checked / plain:.1f}"
        print(f"| {row} | {alone * 1e3:.1f} ms | {checked / alone:.1f} |", flush=True)


def busy_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def background() -> None:
    """The idle daemon's share of a core, with the background check and without; then fsck of the same disk."""
    geometry: Geometry = opaque(DISK_BLOCK_BYTES)
    share: dict[str, float] = {}
    directory = Path(tempfile.mkdtemp(prefix="kvprice-", dir=os.environ.get("TMPDIR", "/tmp")))
    for rate in ("0", "16MiB"):
        with DaemonProcess(directory, ["--scrub-bytes-per-s", rate], dram="64MiB", nvme_bytes="512MiB") as daemon:
            with KVClient(daemon.address) as client:
                if rate == "0":
                    fill(client, client.open_namespace(IDENTITY, geometry), chain(1, 32))
                    for seed in range(2, 2 + DISK_BLOCKS // 32 - 1):
                        fill(client, client.open_namespace(IDENTITY, geometry), chain(seed, 32))
                        eventually(lambda: client.stats().counters["demoted"] % 32 == 0)
                    all_on_disk(client, DISK_BLOCKS)
                began_s = busy_s(daemon.pid)
                time.sleep(IDLE_S)
                share[rate] = (busy_s(daemon.pid) - began_s) / IDLE_S
                scrubbed = client.stats().counters["scrubbed_bytes"]
            data = daemon.data
            daemon.stop()
    idle, busy = share.values()
    print(f"\nidle daemon: {idle:.1%} of a core without the background check, {busy:.1%} with it ({scrubbed >> 20} MiB looked at)")
    began_at = time.perf_counter()
    command = [sys.executable, "-c", "from kvstore.cli.main import main; raise SystemExit(main())", "fsck", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    print(f"fsck: {time.perf_counter() - began_at:.1f} s, start included: {done.stdout.strip()}")
    shutil.rmtree(directory)


if __name__ == "__main__":
    hits()
    background()
