"""Milliseconds of calls to a daemon, by turns with empty calls of the same kind and size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Self

from kvstore.bench.bench import Bench
from kvstore.bench.echo import Echo
from kvstore.bench.yardsticks import median_ms, second_of_two_s, timed
from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess

CALLS = 300  # of each figure
WARM_CALLS = 3  # before those that count


class Calls:
    """A daemon beside an echo process: `lookups` and `commits` give medians by the names that the documentation quotes."""

    def __init__(self, daemon: DaemonProcess, bench: Bench, place: Path) -> None:
        """`place`: a directory for the echo's sockets."""
        self._bench = bench
        with ExitStack() as stack:
            self._echo = stack.enter_context(Echo(place))
            self._by_grpc = stack.enter_context(KVClient(daemon.address, name="bench, over gRPC alone"))
            self._by_grpc._quick.close()
            self._stack = stack.pop_all()

    def lookups(self, chains: Iterable[bytes]) -> dict[str, float]:
        """Lookups of one chain after another (all of one length), over gRPC and over the socket of lookups, each beside its echo."""
        asked = cycle(chains)
        blocks = len(first := next(asked)) // 32
        found = self._bench.client.lookup(self._bench.space, first).blocks
        if found != blocks:
            raise RuntimeError(f"{found} of {blocks} blocks were found")
        by_grpc = _paired(lambda: self._echo.grpc_ms(blocks), self._looking(self._by_grpc, asked))
        by_socket = _paired(lambda: self._echo.socket_ms(blocks), self._looking(self._bench.client, asked))
        return {"echo": by_grpc[0], "lookup": by_grpc[1], "echo_socket": by_socket[0], "lookup_socket": by_socket[1]}

    def _looking(self, client: KVClient, asked: Iterator[bytes]) -> Callable[[], float]:
        return lambda: 1e3 * second_of_two_s(lambda: client.lookup(self._bench.space, next(asked)))

    def leases(self, hashes: bytes) -> dict[str, float]:
        """Leases of blocks that are in DRAM, and commits of as many new ones."""
        blocks = len(hashes) // 32
        new = (self._bench.hashes(blocks, blocks + 4096 * number) for number in range(1, CALLS + WARM_CALLS + 1))
        acquire = _paired(lambda: self._echo.grpc_ms(blocks), lambda: 1e3 * timed(lambda: self._bench.get(hashes, None)))
        commit = _paired(lambda: self._echo.grpc_ms(blocks), lambda: 1e3 * self._commit_s(next(new)))
        return {"acquire": acquire[1], "commit": commit[1]}

    def _commit_s(self, hashes: bytes) -> float:
        """Seconds of the commit alone: the slots are there, and their bytes are nobody's concern here."""
        bench = self._bench
        with bench.client.put(bench.space, hashes) as put:
            for block in put.blocks:
                block.done()
            began = time.perf_counter()
        return time.perf_counter() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _paired(empty_ms: Callable[[], float], call_ms: Callable[[], float]) -> tuple[float, float]:
    """Medians, in milliseconds, of the one and the other, by turns."""
    pairs = [(empty_ms(), call_ms()) for _ in range(WARM_CALLS + CALLS)][WARM_CALLS:]
    empty, call = zip(*pairs, strict=True)
    return median_ms(list(empty)), median_ms(list(call))
