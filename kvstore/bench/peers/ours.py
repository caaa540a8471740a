"""This store on the peers' work: a real daemon process without a disk tier, checksums as by default, and a client in this process."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.bench import wait_touched
from kvstore.bench.peers.pipe import PeerFailed
from kvstore.bench.peers.work import Work
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.geometry import Geometry
from kvstore.hashing import Identity, block_hashes
from kvstore.testing.daemon import DaemonProcess

ARENA_FACTOR = 1.25  # times the bytes that are stored at once: some air
SPARE_BYTES = 128 << 20  # bytes beside it: extents that are cut for other sizes
TOKEN_ID = 9906  # any token: what tells turns apart is the first


class Ours:
    """The same commands as a driver's; times include the hashing of the tokens."""

    def __init__(self, work: Work, directory: Path) -> None:
        """Starts the daemon. The buffer is stored from, and retrieved into."""
        self._work = work
        self._daemon = DaemonProcess(directory, dram=str(int(work.size_bytes * ARENA_FACTOR) + SPARE_BYTES), nvme=False).start()
        try:
            wait_touched(self._daemon)
            self._client = KVClient(self._daemon.address, name="peers")
            geometry = Geometry("mha", work.layers, work.kv_heads, work.head_dim, work.head_dim, "float16", work.block_tokens)
            self._space: Namespace = self._client.open_namespace(Identity(model="peers", dtype="float16"), geometry)
            buffer = np.frombuffer(np.random.default_rng(1).bytes(work.size_bytes), np.uint8).copy()
        except BaseException:
            self._daemon.close()
            raise
        self._buffer = buffer
        self._parts = [buffer[at : at + work.block_bytes] for at in range(0, work.size_bytes, work.block_bytes)]
        self.about = {"version": self._client.stats().version, "how": "shared memory, gRPC over a Unix socket"}

    def _tokens(self, turn: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        tokens = np.full(self._work.tokens, TOKEN_ID, np.uint32)
        tokens[0] = turn
        return tokens

    def ask(self, do: str, *, turn: int = 0, per_object: int = 1) -> dict[str, Any]:
        """Carry out a command; see driver.py. Raises PeerFailed where blocks were not stored, or not found."""
        match do:
            case "store":
                return {"seconds": self._store(turn)}
            case "retrieve":
                return {"seconds": self._retrieve(turn)}
            case "check":
                before = hashlib.sha256(self._buffer.data).digest()
                self._buffer[:] = 0
                self._retrieve(turn)
                return {"equal": hashlib.sha256(self._buffer.data).digest() == before}
            case "lookup":
                return self._lookup(turn)
            case "clear":
                self._client.clear()
                return {}
        raise ValueError(f"unknown command {do!r}")

    def _store(self, turn: int) -> float:
        tokens = self._tokens(turn)
        began = time.perf_counter()
        with self._client.put(self._space, block_hashes(self._space.root, tokens, self._work.block_tokens)) as put:
            put.write_all(self._parts)
        seconds = time.perf_counter() - began
        if put.stored != self._work.blocks or len(put.blocks) != self._work.blocks:
            raise PeerFailed(f"{put.stored} of {self._work.blocks} blocks were stored, {len(put.blocks)} of them now")
        return seconds

    def _retrieve(self, turn: int) -> float:
        tokens = self._tokens(turn)
        began = time.perf_counter()
        with self._client.get(self._space, block_hashes(self._space.root, tokens, self._work.block_tokens)) as lease:
            copied = lease.copy_into(self._parts)
        seconds = time.perf_counter() - began
        if copied != self._work.blocks:
            raise PeerFailed(f"{copied} of {self._work.blocks} blocks came back")
        return seconds

    def _lookup(self, turn: int) -> dict[str, Any]:
        tokens = self._tokens(turn)
        began = time.perf_counter()
        hashes = block_hashes(self._space.root, tokens, self._work.block_tokens)
        hashed = time.perf_counter()
        found = self._client.lookup(self._space, hashes)
        ended = time.perf_counter()
        return {"seconds": ended - began, "of_hashes_seconds": ended - hashed, "found": found.blocks}

    def close(self) -> None:
        """End client and daemon."""
        self._client.close()
        self._daemon.close()
