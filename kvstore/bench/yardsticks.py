"""What the machine itself does: copies between shared segments, raw O_DIRECT, an empty call of the same size."""

from __future__ import annotations

import asyncio
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
ECHO_METHOD = "/kvstore.bench.Echo/Unary"


def gbps(size_bytes: int, seconds: float) -> float:
    """Gigabytes (1e9) per second."""
    return size_bytes / seconds / 1e9


def timed(act: Callable[[], object]) -> float:
    """Seconds that one call took."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


@contextmanager
def shared_segment(size_bytes: int) -> Iterator[Bytes]:
    """A prefaulted segment of shared memory."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        memory = mmap.mmap(file.fileno(), size_bytes)
        segment = np.frombuffer(memory, np.uint8)
        segment[:: mmap.PAGESIZE] = 1
        yield segment


class Memcpy:
    """Copies between two shared segments, block by block, by as many threads as asked."""

    def __init__(self, source: Bytes, target: Bytes) -> None:
        self._source, self._target = source, target

    def run(self, block_bytes: int, threads: int) -> float:
        """GB/s of one pass over the segments."""
        starts = range(0, len(self._source) - block_bytes + 1, block_bytes)

        def copy(which: int) -> None:
            for start in starts[which::threads]:
                np.copyto(self._target[start : start + block_bytes], self._source[start : start + block_bytes])

        with ThreadPoolExecutor(threads) as pool:
            return gbps(len(starts) * block_bytes, timed(lambda: list(pool.map(copy, range(threads)))))


class RawDisk:
    """One preallocated file, read and written past the page cache by several threads, as a plain program would."""

    def __init__(self, directory: Path, memory: Bytes) -> None:
        """`memory`: page-aligned; what is written, and where reads go."""
        self._path = directory / "yardstick"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(self._fd, 0, len(memory))
        self._memory = memoryview(memory)  # type: ignore[arg-type]  # an array is a buffer

    def run(self, block_bytes: int, threads: int, *, write: bool) -> float:
        """GB/s of one pass over the file."""
        starts = range(0, len(self._memory) - block_bytes + 1, block_bytes)
        call = os.pwritev if write else os.preadv

        def move(which: int) -> None:
            for start in starts[which::threads]:
                if call(self._fd, [self._memory[start : start + block_bytes]], start) != block_bytes:
                    raise OSError(f"{self._path}: a short transfer at {start}")

        with ThreadPoolExecutor(threads) as pool:
            return gbps(len(starts) * block_bytes, timed(lambda: list(pool.map(move, range(threads)))))

    def close(self) -> None:
        """Remove the file."""
        os.close(self._fd)
        self._path.unlink()


# ---- an empty call


class Echo:
    """A process that answers with nothing, over the same library, loop and kind of socket as the daemon's."""

    def __init__(self, directory: Path) -> None:
        socket = directory / "echo.sock"
        command = [sys.executable, "-m", "kvstore.bench.yardsticks", str(socket)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if not self._process.stdout or not self._process.stdout.readline():
            raise RuntimeError("the echo process did not start")
        self._channel = grpc.insecure_channel(f"unix:{socket}")
        self._call: Any = self._channel.unary_unary(ECHO_METHOD)

    def unary_ms(self, size_bytes: int, rounds: int) -> list[float]:
        """The time of each of `rounds` calls with a message of this size, in milliseconds."""
        message = bytes(size_bytes)
        self._call(message)
        return [1e3 * timed(lambda: self._call(message)) for _ in range(rounds)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.terminate()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


def median_ms(times: list[float]) -> float:
    """The middle one, to a microsecond."""
    return round(statistics.median(times), 3)


async def _serve_echo(socket: str) -> None:
    async def unary(_: bytes, __: object) -> bytes:
        return b""

    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Unary": grpc.unary_unary_rpc_method_handler(unary)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvstore.bench.Echo", handlers),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.install()
    except ImportError:
        pass
    asyncio.run(_serve_echo(sys.argv[1]))
