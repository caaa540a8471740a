"""A client that does nothing wrong, at work while others attack: it must get what it is due, in time, and every byte its own."""

from __future__ import annotations

import threading
import time
from typing import Self

from kvstore import errors
from kvstore.clients.client import KVClient
from tests.blocks import GEOMETRY, IDENTITY, chain, right

BLOCKS = 8  # blocks of each chain
GUARANTEE_BYTES = 4 << 20  # 4 MiB of memory that nobody can take from it: far more than it holds at once


class Bystander:
    """At work in a thread of its own inside a `with` block."""

    def __init__(self, address: str) -> None:
        self.rounds = 0
        self.stored_blocks = 0
        self.read_blocks = 0
        self.slowest_s = 0.0
        self.faults: list[str] = []
        self._client = KVClient(address, name="bystander", guarantee_bytes=GUARANTEE_BYTES)
        self._namespace = self._client.open_namespace(IDENTITY, GEOMETRY)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._round(0)  # so that it has its guarantee before anybody else is there
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)
        if self._thread.is_alive():
            self.faults.append("it hangs")
        self._client.close()

    def _run(self) -> None:
        seed = 1
        while not self._stop.is_set() and len(self.faults) < 20:
            started_at = time.monotonic()
            try:
                self._round(seed % 800)
            except errors.KVStoreError as error:
                self.faults.append(f"round {seed}: {type(error).__name__}: {error}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - started_at)
            seed += 1

    def _round(self, seed: int) -> None:
        hashes = chain(seed, BLOCKS)
        with self._client.put(self._namespace, hashes) as put:
            for block in put.blocks:
                block.write(_bytes(block.hash))
        if put.stored != BLOCKS:
            self.faults.append(f"chain {seed}: {put.names}")
        self.stored_blocks += put.stored
        self._client.lookup(self._namespace, hashes)
        with self._client.get(self._namespace, hashes) as lease:
            self.read_blocks += lease.blocks
            if not right(lease.views, hashes):
                self.faults.append(f"chain {seed}: wrong bytes")
        self._client.stats()
        self.rounds += 1


def _bytes(key: bytes) -> bytes:
    return (key * (GEOMETRY.block_bytes // len(key) + 1))[: GEOMETRY.block_bytes]
