"""The process that drives a peer: one line of JSON a command on stdin, one line of JSON an answer on stdout.

Runs under the Python of the peer's own venv, so neither it nor what it loads imports anything of kvstore.

    python driver.py PATH_OF_THE_PEERS_MODULE '{"blocks": 512, ...}'

The first line that it writes is the peer's `about`, or {"error": ...}. Then, until stdin ends:

    {"do": "store" | "retrieve", "turn": 3, "per_object": 1}           {"seconds": 0.41}
    {"do": "check", "turn": 3, "per_object": 1}                        {"equal": true}
    {"do": "lookup", "turn": 3, "per_object": 1, "stored": true}       {"seconds": 0.006, "found": 2048}
    {"do": "clear"}                                                    {}
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

START_TIMEOUT_S = 60.0  # seconds for a peer's server to answer: an import of torch, and gigabytes of memory taken
END_TIMEOUT_S = 15.0  # seconds for a server to end in order and give its memory back
POLL_S = 0.05  # seconds between two tries to reach it


class Peer(Protocol):
    """What a peer's module makes with `open_peer(work, run)`.

    It owns one buffer of work["blocks"] × work["block_bytes"] bytes, from which it stores and into which it retrieves. `turn` makes
    keys that no other turn has; objects of a turn hold `per_object` blocks each.
    """

    def about(self) -> dict[str, str]:
        """`version`, and `how` it is driven."""

    def store(self, turn: int, per_object: int) -> float:
        """Put the whole buffer. Returns the seconds it took."""

    def retrieve(self, turn: int, per_object: int, *, into_buffer: bool) -> float:
        """Get all of it back as a copy of the caller's own, in the buffer where that is asked for. Returns the seconds it took."""

    def lookup(self, turn: int, per_object: int) -> tuple[float, int]:
        """Ask how much of the prefix is there. Returns the seconds, and the blocks found."""

    def digest(self) -> str:
        """Of the buffer's bytes."""

    def wipe(self) -> None:
        """Overwrite the buffer."""

    def clear(self) -> None:
        """Forget everything that was stored."""

    def close(self) -> None:
        """End the client."""


class Servers:
    """The peer's own processes, ended with this one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.leftovers: list[Path] = []  # files outside the directory, removed at the end should a server have left them
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], ready: Callable[[], bool], environment: Mapping[str, str] | None = None) -> None:
        """Start one and wait until `ready` says so. Raises RuntimeError where it ends before, or takes too long."""
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env={**os.environ, **(environment or {})})
        self._started.append(process)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            if process.poll() is not None:
                raise RuntimeError(f"{Path(command[0]).name} ended with status {process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{Path(command[0]).name} was not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def end(self) -> None:
        """End all, the last one first."""
        for process in reversed(self._started):
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for path in self.leftovers:
            path.unlink(missing_ok=True)

    @staticmethod
    def free_port() -> int:
        """A port of this machine that nobody has now."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    @staticmethod
    def listens(port: int) -> bool:
        """Whether somebody accepts connections there."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    @staticmethod
    def program(*names: str) -> str | None:
        """The first of these that is beside this Python, or on the PATH."""
        beside = str(Path(sys.executable).parent)
        return next((found for name in names if (found := shutil.which(name, path=f"{beside}:{os.environ.get('PATH', '')}"))), None)


def serve(peer: Peer, answer: Callable[[dict[str, Any]], None]) -> None:
    """Carry out the commands of stdin until it ends."""
    for line in sys.stdin:
        command = json.loads(line)
        turn, per_object = command.get("turn", 0), command.get("per_object", 1)
        match command["do"]:
            case "store":
                answer({"seconds": peer.store(turn, per_object)})
            case "retrieve":
                answer({"seconds": peer.retrieve(turn, per_object, into_buffer=False)})
            case "check":
                before = peer.digest()
                peer.wipe()
                peer.retrieve(turn, per_object, into_buffer=True)
                answer({"equal": peer.digest() == before})
            case "lookup":
                seconds, found = peer.lookup(turn, per_object)
                answer({"seconds": seconds, "found": found})
            case "clear":
                peer.clear()
                answer({})
            case other:
                raise ValueError(f"unknown command {other!r}")


def main(module_path: str, work: dict[str, Any]) -> int:
    """Drive one peer. Returns the exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the peer prints goes to the log

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    servers = Servers(Path(work["directory"]))
    try:
        spec = importlib.util.spec_from_file_location("peer_module", module_path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{module_path} is no module")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        peer: Peer = module.open_peer(work, servers)
        answer(peer.about())
        serve(peer, answer)
        peer.close()
    except Exception as error:  # noqa: BLE001 — whatever befalls a peer is reported, not raised
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    finally:
        servers.end()
    return 0


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's names are no modules for the peer's packages to find
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
