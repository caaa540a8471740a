"""A process that owns a pool of GPU memory and offers it, for tests of sharing; and those tests' steps, for a real GPU and for the fake.

    python -m tests.tiers.hbm_owner SOCKET [--fake] [--ipc]     prints "ready"; then for each line "read", the pool's first bytes in hex
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvstore.clients.hbm import ImportedPool
from kvstore.errors import Unavailable
from kvstore.geometry import UNIT_BYTES
from kvstore.kernels.driver import CudaDriver, LibCuda
from kvstore.testing.fake_cuda import FakeCuda
from kvstore.testing.tier_contract import aligned, filled, pattern
from kvstore.tiers.hbm import HbmOptions, HbmTier
from kvstore.tiers.hbm_socket import PoolSocket

ROOT = Path(__file__).resolve().parent.parent.parent
CAPACITY_BYTES = 1 << 20
SHOWN_BYTES = 64  # of the pool, that the owner prints
WAIT_S = 60.0  # seconds for a process to start or end


def main() -> int:
    """Own, offer, answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket", type=Path)
    parser.add_argument("--fake", action="store_true")
    parser.add_argument("--ipc", action="store_true")
    args = parser.parse_args()
    driver: CudaDriver = FakeCuda(descriptors=not args.ipc) if args.fake else LibCuda()
    tier = HbmTier(driver, HbmOptions(0, CAPACITY_BYTES))
    tier.write(0, [filled(1, UNIT_BYTES)])
    offered = PoolSocket(tier.pool, args.socket)
    print("ready", flush=True)
    target = aligned(UNIT_BYTES)
    for _ in sys.stdin:
        tier.read(0, [target])
        print(bytes(target[:SHOWN_BYTES]).hex(), flush=True)
    offered.close()
    tier.close()
    return 0


class Owner:
    """Such a process."""

    def __init__(self, socket: Path, *flags: str) -> None:
        words = [sys.executable, "-m", "tests.tiers.hbm_owner", str(socket), *flags]
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._line() != "ready":
            raise AssertionError(f"the owner ended with {self.process.wait(WAIT_S)}")

    def shown(self) -> bytes:
        """What the owner finds at the pool's start."""
        assert self.process.stdin is not None
        self.process.stdin.write("read\n")
        self.process.stdin.flush()
        return bytes.fromhex(self._line())

    def end(self, *, kill: bool) -> None:
        """Kill it, or let it end in order."""
        if kill:
            self.process.kill()
        self.process.communicate(timeout=WAIT_S)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def move(driver: CudaDriver, device: int, to: int, of: int) -> None:
    """Copy one unit and wait."""
    stream, event = driver.stream(device), driver.event(device)
    driver.copy(device, stream, to, of, UNIT_BYTES)
    driver.record(device, stream, event)
    driver.wait(device, event)
    driver.close_event(device, event)
    driver.close_stream(device, stream)


def check_sharing(driver: CudaDriver, socket: Path, *flags: str) -> dict[str, object]:
    """Two processes see each other's bytes in GPU memory, and the importer still does once the owner was killed, where it may."""
    owner = Owner(socket, *flags)
    target = np.frombuffer(aligned(UNIT_BYTES), np.uint8)
    try:
        pool = ImportedPool(driver, socket)
        move(driver, pool.device, target.ctypes.data, pool.address)
        assert target.tobytes() == pattern(1, UNIT_BYTES), "the importer reads other bytes than the owner wrote"
        source = np.frombuffer(filled(2, UNIT_BYTES), np.uint8)
        move(driver, pool.device, pool.address, source.ctypes.data)
        assert owner.shown() == pattern(2, UNIT_BYTES)[:SHOWN_BYTES], "the owner reads other bytes than the importer wrote"
    finally:
        owner.end(kill=True)
    pool.owner_ended()
    if pool.outlives_owner:
        target[:] = 0
        move(driver, pool.device, target.ctypes.data, pool.address)
        assert target.tobytes() == pattern(2, UNIT_BYTES), "the memory did not outlive its owner"
    else:
        try:
            pool.view(0, UNIT_BYTES)
        except Unavailable:
            pass
        else:
            raise AssertionError("memory that went with its owner is still given out")
    outlived = pool.outlives_owner
    pool.close()
    return {"shared": True, "outlives_its_owner": outlived}


if __name__ == "__main__":
    sys.exit(main())
