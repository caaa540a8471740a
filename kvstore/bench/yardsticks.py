"""What the machine itself does: copies between shared segments, raw O_DIRECT."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def gbps(size_bytes: int, seconds: float) -> float:
    """Gigabytes (1e9) per second."""
    return size_bytes / seconds / 1e9


def timed(act: Callable[[], object]) -> float:
    """Seconds that one call took."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def second_of_two_s(act: Callable[[], object]) -> float:
    """Seconds that a call took just after one like it: what both sides run is in their processors' caches."""
    act()
    return timed(act)


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


def median_ms(times: list[float]) -> float:
    """The middle one, to a microsecond."""
    return round(statistics.median(times), 3)
