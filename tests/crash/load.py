"""A client process under load: stores, reads, holds and gives up at random until it is killed, and checks every byte that it reads.

It outlives the daemon, and goes on with the next one. A line `n` on standard input makes it write the chains of round n. On standard
output it says, as one JSON object a line, how much it has done so far, and at once whatever is wrong.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter, deque
from contextlib import ExitStack

import numpy as np

from kvstore import errors
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.lease import Lease
from tests.blocks import IDENTITY
from tests.crash.keys import CHAIN_BLOCKS, GEOMETRIES, bytes_of, chain

CHAINS_PER_ROUND = 64  # so that a second of writing does not fill them
MAX_HELD = 6  # leases kept open at once
REPORT_S = 0.05  # seconds between two lines
AWAY = (errors.Unavailable, errors.SessionEnded, errors.StaleEpoch)  # what the end of a daemon means to its clients
GIVEN_UP = ZeroDivisionError  # stands for whatever ends a `with put` block early


class Load:
    """Call `run`."""

    def __init__(self, address: str, seed: int) -> None:
        self.round = 0
        self._chance = random.Random(seed)
        self._client = KVClient(address, name=f"load {seed}")
        self._namespaces: list[Namespace] = []
        self._held: deque[tuple[ExitStack, Lease, Namespace, list[bytes]]] = deque()
        self._counts: Counter[str] = Counter()

    def run(self) -> None:
        """Until the process is killed."""
        reported_at = 0.0
        while True:
            try:
                if not self._namespaces:
                    self._namespaces = [self._client.open_namespace(IDENTITY, geometry) for geometry in GEOMETRIES]
                self._step()
            except AWAY as error:
                self._counts[type(error).__name__] += 1
                time.sleep(0.02)
            except Exception as error:  # noqa: BLE001 — whatever it is, the test is to hear of it
                say({"fault": f"{type(error).__name__}: {error}"})
            if time.monotonic() > reported_at + REPORT_S:
                reported_at = time.monotonic()
                say({"counts": dict(self._counts)})

    def _step(self) -> None:
        namespace = self._chance.choice(self._namespaces)
        match self._chance.random():
            case share if share < 0.5:
                self._write(namespace)
            case share if share < 0.9:
                self._read(namespace)
            case share if share < 0.95:
                self._client.prefetch(namespace, b"".join(self._chain(self.round - 2)))
            case _:
                self._client.lookup(namespace, b"".join(self._chain(0)))

    def _chain(self, first_round: int) -> list[bytes]:
        return chain(self._chance.randrange(max(0, first_round) * CHAINS_PER_ROUND, (self.round + 1) * CHAINS_PER_ROUND))

    def _write(self, namespace: Namespace) -> None:
        keys = self._chain(self.round)[: self._chance.randint(1, CHAIN_BLOCKS)]
        give_up = self._chance.random() < 0.1
        try:
            with self._client.put(namespace, b"".join(keys)) as put:
                for block in put.blocks:
                    data = bytes_of(block.hash, len(block.view))
                    half = len(data) // 2
                    block.view[:half] = data[:half]
                    if self._chance.random() < 0.02:
                        time.sleep(0.005)
                    block.view[half:] = data[half:]
                    if give_up:
                        raise GIVEN_UP
                    block.done()
        except GIVEN_UP:
            self._counts["given up"] += 1
        else:
            self._counts.update(put.names)

    def _read(self, namespace: Namespace) -> None:
        keys = self._chain(self.round - 3)
        stack = ExitStack()
        lease = stack.enter_context(self._client.get(namespace, b"".join(keys)))
        self._check(lease, namespace, keys)
        if self._chance.random() < 0.3:
            self._held.append((stack, lease, namespace, keys))
        else:
            stack.close()
        if len(self._held) > MAX_HELD:
            held, old, whose, asked = self._held.popleft()
            self._check(old, whose, asked)
            held.close()

    def _check(self, lease: Lease, namespace: Namespace, keys: list[bytes]) -> None:
        """Also when the session is over: until a lease is given back, nobody writes over what it shows."""
        size_bytes = namespace.geometry.block_bytes
        for view, key in zip(lease._views, keys, strict=False):
            self._counts["read"] += 1
            if not np.array_equal(view, bytes_of(key, size_bytes)):
                say({"wrong": key.hex(), "blocks": len(lease._views), "ended": repr(lease.attached and lease.attached.error)})


def say(words: dict[str, object]) -> None:
    """One line for the test."""
    print(json.dumps(words), flush=True)


def main() -> None:
    load = Load(sys.argv[1], int(sys.argv[2]))
    load.round = int(sys.argv[3])
    threading.Thread(target=load.run, daemon=True).start()
    for line in sys.stdin:
        load.round = int(line)


if __name__ == "__main__":
    main()
