"""A client process that does what a test tells it, so that the test can stop it, kill it, or fork it.

Commands come one a line on standard input; each is answered with one line of JSON. `Puppet` is the test's side.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from kvstore.clients.client import KVClient
from kvstore.clients.lease import Lease
from tests.blocks import GEOMETRY, IDENTITY, chain, pattern, right

ROOT = Path(__file__).resolve().parents[2]


class Puppet:
    """The test's side. Use it in a `with` block."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.daemon.puppet", address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def tell(self, *words: object) -> Any:
        """One command, and its answer."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the puppet has no pipes")
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def send(self, number: signal.Signals) -> None:
        """A signal."""
        self._process.send_signal(number)

    def kill(self) -> float:
        """SIGKILL; returns when the process is reaped."""
        self._process.kill()
        self._process.wait()
        return time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _serve(address: str) -> None:
    client = KVClient(address, name="puppet")
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    held = ExitStack()
    leases: list[tuple[Lease, bytes]] = []
    for line in sys.stdin:
        command, seed, blocks = (*line.split(), "0", "0")[:3]
        hashes = chain(int(seed), int(blocks)) if int(blocks) else b""
        match command:
            case "put":
                with client.put(namespace, hashes) as put:
                    for block in put.blocks:
                        block.write(pattern(block.hash))
                answer: object = put.stored
            case "reserve":  # and never finish
                answer = held.enter_context(client.put(namespace, hashes)).names
            case "hold":
                leases.append((held.enter_context(client.get(namespace, hashes)), hashes))
                answer = leases[-1][0].blocks
            case "peek":  # the bytes of what is held, whatever became of the session
                answer = all(right(lease._views, hashes) for lease, hashes in leases)
            case "check":
                answer = _checked(leases)
            case "drop":
                held.close()
                leases.clear()
                answer = True
            case "fork":  # a child that outlives its parent, with everything that it inherits
                child = os.fork()
                if child == 0:
                    signal.pause()
                answer = child
            case _:
                answer = client.lookup(namespace, hashes).blocks
        print(json.dumps(answer), flush=True)


def _checked(leases: list[tuple[Lease, bytes]]) -> str:
    try:
        for lease, _ in leases:
            lease.check()
    except Exception as error:  # noqa: BLE001 — the test wants its name
        return type(error).__name__
    return "ok"


if __name__ == "__main__":
    _serve(sys.argv[1])
