"""A client that uses a pool of GPU memory as a worker does: fills slots there, commits, leases, reads. Also as a process of its own.

    python -m tests.hbm.user ADDRESS     then, for each line ["command", arguments...], an answer as `tests.cases.child` gives it
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.blocks import Slots
from kvstore.clients.blocksession import BlockSession
from kvstore.clients.channel import target
from kvstore.clients.hbm import ImportedPool
from kvstore.clients.pools import Pool, PoolTerms
from kvstore.geometry import UNIT_BYTES
from kvstore.hashing import fingerprint
from kvstore.testing.fake_cuda import FakeCuda
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern
from tests.cases.children import Child

WAIT_S = 20.0  # seconds: far beyond what a loaded machine takes
TRIES = 3  # times that a session is asked for
GPUS = 2  # GPUs that this process sees

Bytes = NDArray[np.uint8]


def patiently(attach: Callable[[], BlockSession]) -> BlockSession:
    """A session with a daemon that is there. On a machine where nobody gets to run for 20 s gRPC gives a connection up."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(errors.Unavailable, errors.DeadlineExceeded):
            return attach()
    return attach()


class GpuUser:
    """One session with the pools of these GPUs, one of them mapped."""

    def __init__(self, address: str, gpu: str = "gpu-0", terms: Sequence[PoolTerms] = (), map_it: bool = True) -> None:
        self.driver = FakeCuda(devices=GPUS)
        request = requests.open_namespace(IDENTITY, GEOMETRY, "", "", requests.KEEP_ALL)
        hello = requests.hello(f"user of {gpu}", 0, 0, terms or [PoolTerms(f"gpu-{number}") for number in range(GPUS)])
        self.session = patiently(lambda: BlockSession(target(address), GEOMETRY, request, hello))
        self._gpu = gpu
        self._leases: set[int] = set()
        if map_it:
            self.map()

    def map(self) -> None:
        """Take the pool that there is now."""
        self.pool: Pool = self.session.pools[self._gpu]
        self.memory: ImportedPool = self.session.map_pool(self.driver, self.pool)

    def put(self, lease: int, seed: int, blocks: int) -> dict[str, int]:
        """Commit the chain of a prompt in the pool; how many blocks had which outcome, over all puts so far."""
        hashes = chain(seed, blocks)
        self._leases.add(lease)
        slots = self.session.reserve(blocks, pool=self.pool)
        self.fill(slots, hashes)
        self.session.commit(lease, slots, hashes[: 32 * len(slots)], fingerprint(IDENTITY), pool=self.pool)
        assert self.session.flush(WAIT_S)
        return {name: count for name, count in self.session.outcomes.items() if count}

    def fill(self, slots: Slots, hashes: bytes) -> None:
        """Write each block's own bytes into its slot."""
        for unit, key in zip(slots.units.tolist(), each_hash(hashes), strict=False):
            self._copy(pattern(key), unit, down=False)

    def get(self, lease: int, seed: int, blocks: int) -> int:
        """Lease the leading blocks of a prompt in the pool, and read them; how many there are. All of them must be right."""
        hashes = chain(seed, blocks)
        self._leases.add(lease)
        slots = self.session.acquire(lease, hashes, WAIT_S, pool=self.pool)
        assert all(self.read(unit, key) for unit, key in zip(slots.units.tolist(), each_hash(hashes), strict=False)), "wrong bytes"
        return len(slots)

    def read(self, unit: int, key: bytes) -> bool:
        """Whether a slot has a block's bytes."""
        found = np.zeros(GEOMETRY.block_bytes, np.uint8)
        self._copy(found, unit, down=True)
        return np.array_equal(found, pattern(key))

    def get_in_dram(self, lease: int, seed: int, blocks: int) -> int:
        """The same where a client without GPU looks."""
        hashes = chain(seed, blocks)
        slots = self.session.acquire(lease, hashes, WAIT_S)
        views = [self.session.arena[unit * UNIT_BYTES :][: GEOMETRY.block_bytes] for unit in slots.units.tolist()]
        assert all(np.array_equal(view, pattern(key)) for view, key in zip(views, each_hash(hashes), strict=False)), "wrong bytes"
        return len(slots)

    def release(self, *leases: int) -> None:
        """End leases in the pool."""
        for lease in leases:
            self.session.release(lease, pool=self.pool)

    def release_dram(self, lease: int) -> None:
        """End a lease there."""
        self.session.release(lease)

    def reserve(self, count: int) -> int:
        """Slots that are never filled; how many there were."""
        return len(self.session.reserve(count, pool=self.pool))

    def close(self) -> None:
        """Give leases back, end the session, then the mapping."""
        self.release(*self._leases)
        self.session.close()
        self.memory.close()
        assert not self.driver.violations

    def _copy(self, host: Bytes, unit: int, *, down: bool) -> None:
        device, there = self.memory.device, self.memory.address + unit * UNIT_BYTES
        stream, event = self.driver.stream(device), self.driver.event(device)
        to, of = (host.ctypes.data, there) if down else (there, host.ctypes.data)
        self.driver.copy(device, stream, to, of, host.nbytes)
        self.driver.record(device, stream, event)
        self.driver.wait(device, event)
        self.driver.close_event(device, event)
        self.driver.close_stream(device, stream)


class UserProcess(Child):
    """Such a client in a process of its own."""

    program = "tests.hbm.user"


def main() -> None:
    """Answer each line until the input ends."""
    user = GpuUser(sys.argv[1])
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"value": getattr(user, command)(*arguments)}
        except errors.KVStoreError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
