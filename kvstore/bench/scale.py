"""`kvstore bench scale`: what a block costs in memory and time as the index grows, and how long a start from disk takes.

Each size runs in processes of its own, the same operations in each: the cache core with its arrays, no arena, no daemon around it. Of an
operation the shortest of its times counts towards the longest: what another machine's guest or the system did meanwhile comes once, what
the operation costs comes every time. The start is a real daemon's.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvstore.bench.bench import Bench, wait_touched
from kvstore.bench.calls import CALLS, Calls
from kvstore.cache.core import Cache
from kvstore.cache.messages import UNIT_BYTES, Acquire, Attach, Commit, Hashes, NamespaceSpec, Release, Reserve, Reserved
from kvstore.cache.state import CacheSizes, extent_bytes_for
from kvstore.native.library import library
from kvstore.testing.daemon import DaemonProcess

NAME = "scale"
HELP = "Memory and time a block for indexes of ten thousand to ten million blocks, the start from disk, and lookups then."

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)  # blocks
START_BLOCKS = 1_000_000  # blocks on disk that a daemon starts with: 4 GiB of the smallest
BATCH_BLOCKS = 2048  # blocks: a 32,768-token prompt in blocks of 16
SLOT_BYTES = 1 << 17  # 128 KiB, less than a small model's block; the arena is never touched
SMALLEST_BYTES = 4096  # a slot: the start from disk reads records, whatever the size of their blocks
REPEATS = 3  # processes of each size
ROUNDS = 200  # batches that push out others, and as many lookups
LOOKUPS = (("gRPC", "lookup", "echo"), ("the socket", "lookup_socket", "echo_socket"))
WRITE_DEADLINE_S = 600.0  # seconds for a slow disk to take 4 GiB

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--blocks", metavar="N", type=int, nargs="*", default=list(SIZES), help="sizes of the index (default: four)")
    parser.add_argument("--start", metavar="N", type=int, default=START_BLOCKS, help="blocks on disk to start with; 0 leaves it out")
    parser.add_argument("--dir", metavar="DIR", type=Path, default=Path("."), help="where the disk tier lies: on the disk to measure")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON. Returns 0."""
    figures: dict[str, Any] = {"compiled_library": library() is not None, "by_blocks": {}}
    for blocks in args.blocks:
        figures["by_blocks"][blocks] = together([_in_a_process(blocks) for _ in range(REPEATS)])
    if args.blocks:
        figures |= figures["by_blocks"][max(args.blocks)]
    if args.start:
        figures |= start_from_disk(args.start, args.dir)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    show(figures)
    return 0


def _in_a_process(blocks: int) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "kvstore.bench.scale", str(blocks)], stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def together(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one size from what `measure` gave several times: medians, and the longest operations."""
    times: list[dict[str, list[float]]] = [each["times"] for each in repeats]
    pooled = {what: [second for each in times for second in each[what]] for what in times[0]}
    figures = {f"{what}_us_per_block": 1e6 * statistics.median(seconds) / BATCH_BLOCKS for what, seconds in pooled.items()}
    figures["bytes_per_block"] = statistics.median(each["bytes_per_block"] for each in repeats)
    longest = {what: 1e3 * max(map(min, zip(*(each[what] for each in times), strict=True))) for what in times[0]}
    figures["longest_ms"], figures["longest_once_ms"] = max(longest.values()), 1e3 * max(max(seconds) for seconds in pooled.values())
    rounded = {name: round(value, 3) for name, value in figures.items()}
    return rounded | {"longest_ms_by": {what: round(value, 2) for what, value in longest.items()}}


class Core:
    """A cache core with room for so many blocks, and the microseconds a block of what it is asked."""

    def __init__(self, blocks: int) -> None:
        extent_bytes = extent_bytes_for(blocks * SLOT_BYTES)
        before_bytes = _resident_bytes()
        self.slots = blocks * SLOT_BYTES // extent_bytes * extent_bytes // SLOT_BYTES  # fewer than rows: so slots are what is short
        self.cache = Cache(CacheSizes(self.slots * SLOT_BYTES, index_blocks=blocks + 2 * BATCH_BLOCKS))
        self.before_bytes = before_bytes
        spec = NamespaceSpec("default", bytes(32), SLOT_BYTES // UNIT_BYTES, SLOT_BYTES)
        opened = self.cache.open_namespace(spec)
        if not isinstance(opened, int):
            raise RuntimeError(f"no namespace: {opened}")
        self.namespace = opened
        self.cache.attach(Attach(1, "default"), 0.0)
        self.cache.drain()
        self.times: dict[str, list[float]] = {}
        self._random = np.random.default_rng(0)
        self._number = 0

    def hashes(self, count: int = BATCH_BLOCKS) -> Hashes:
        """Keys that are new."""
        return self._random.integers(1, 1 << 63, (count, 4), dtype=np.uint64)

    def timed(self, what: str, act: Callable[[], T]) -> T:
        """Do it, and note how long it took, in seconds."""
        began = time.perf_counter()
        result = act()
        self.times.setdefault(what, []).append(time.perf_counter() - began)
        return result

    def store(self, what: str) -> Hashes:
        """One chain of a batch's length; `what`: how the time of reserving is called, which makes room."""
        cache, hashes = self.cache, self.hashes()
        self._number += 1
        slots = self.timed(what, lambda: cache.reserve(Reserve(1, self._number, self.namespace, hashes=hashes)))
        if not isinstance(slots, Reserved) or not slots.generations.all():
            raise RuntimeError(f"no slots: {slots}")
        commit = Commit(1, self._number, self.namespace, slots.units, slots.generations, hashes, self.hashes(1))
        self.timed("commit", lambda: cache.commit(commit))
        self.timed("release", lambda: (cache.release(Release(1, self._number)), cache.drain()))
        return hashes

    def find(self, hashes: Hashes) -> None:
        """Look a chain up, lease it and give it back."""
        cache = self.cache
        self._number += 1
        looked = self.timed("lookup", lambda: cache.lookup("default", self.namespace, "", hashes))
        if getattr(looked, "blocks", 0) != len(hashes):
            raise RuntimeError(f"not found: {looked}")
        acquire = Acquire(1, self._number, hashes, 1.0, self.namespace)
        self.timed("acquire", lambda: (cache.acquire(acquire, 0.0), cache.drain()))
        self.timed("release", lambda: (cache.release(Release(1, self._number)), cache.drain()))

    def whole_at_once(self) -> None:
        """What goes over all blocks, or thousands: each step of it keeps the event loop from other work."""
        cache, number = self.cache, self._number + 1
        pieces = cache.snapshot(self.namespace)
        while self.timed("snapshot", lambda: next(pieces, None)) is not None:
            pass
        cache.attach(Attach(2, "default"), 0.0)
        for each in range(min(8, self.slots // BATCH_BLOCKS)):
            cache.reserve(Reserve(2, number + each, self.namespace, hashes=self.hashes()))
        cache.drain()
        self.timed("detach", lambda: (cache.detach(2), cache.drain()))
        other = cache.open_namespace(NamespaceSpec("default", bytes([1]) * 32, 2 * SLOT_BYTES // UNIT_BYTES, 2 * SLOT_BYTES))
        if not isinstance(other, int):
            raise RuntimeError(f"no second namespace: {other}")
        self.timed("other size", lambda: (cache.reserve(Reserve(1, number, other, 1)), cache.drain()))
        start = 1
        while start:
            _, start = self.timed("clear", partial(self._clear_piece, start))
        self.timed("clear", lambda: (cache.clear(1, (self.namespace,)), cache.drain()))

    def _clear_piece(self, start: int) -> tuple[object, int]:
        done = self.cache.clear_piece((self.namespace,), start)
        self.cache.drain()
        return done


def measure(blocks: int) -> dict[str, Any]:
    """Fill a core with chains, find some of them, and push some out: bytes a block, and seconds of all operations by kind, in order."""
    core = Core(blocks)
    chains = [core.store("reserve") for _ in range(core.slots // BATCH_BLOCKS)]
    for chain in chains[:: max(1, len(chains) // ROUNDS)]:
        core.find(chain)
    for _ in range(ROUNDS):
        core.store("evict")
    bytes_per_block = (_resident_bytes() - core.before_bytes) / blocks
    core.whole_at_once()
    return {"bytes_per_block": bytes_per_block, "times": core.times}


def start_from_disk(blocks: int, directory: Path) -> dict[str, Any]:
    """A daemon with so many blocks on disk is killed and started: until its first lookup, records a second, and lookups then."""
    flags = ["--index-blocks", str(blocks + 2 * BATCH_BLOCKS), "--nvme-write-bytes-per-s", "1TiB"]
    size = str(blocks * SMALLEST_BYTES + (1 << 30))
    with tempfile.TemporaryDirectory(dir=directory) as place, DaemonProcess(Path(place), flags, dram="1GiB", nvme_bytes=size) as daemon:
        bench = Bench(daemon, SMALLEST_BYTES, "scale")
        chains = blocks // BATCH_BLOCKS
        for number in range(chains):
            _put(bench, bench.hashes(BATCH_BLOCKS, number))
            bench.wait_written(number * BATCH_BLOCKS + BATCH_BLOCKS // 2, WRITE_DEADLINE_S)
        bench.wait_written(chains * BATCH_BLOCKS, WRITE_DEADLINE_S)
        bench.client.close()
        began = time.perf_counter()
        daemon.restart()
        bench = Bench(daemon, SMALLEST_BYTES, "scale")
        found = bench.client.lookup(bench.space, bench.hashes(BATCH_BLOCKS, chains - 1)).blocks
        seconds = time.perf_counter() - began
        if found != BATCH_BLOCKS:
            raise RuntimeError(f"{found} of {BATCH_BLOCKS} blocks were found after the restart")
        wait_touched(daemon)
        some = np.random.default_rng(0).permutation(chains)[: 4 * CALLS]  # no chain is asked for twice
        with Calls(daemon, bench, Path(place)) as calls:
            chains_of = [bench.hashes(BATCH_BLOCKS, int(number)) for number in some]
            lookups, again = calls.lookups(chains_of), calls.lookups(chains_of[:1])
        bench.client.close()
        said = re.findall(r"nvme: (\d+) blocks recovered in (\S+) s", daemon.log())[-1]
    read, read_s = int(said[0]), max(float(said[1]), 0.01)
    figures = {"start_blocks": read, "start_s": round(seconds, 3), "start_records_per_s": round(read / read_s)}
    figures |= {f"{what}_{BATCH_BLOCKS}_p50_ms": value for what, value in lookups.items()}
    return figures | {f"{what}_again_{BATCH_BLOCKS}_p50_ms": value for what, value in again.items()}


def _put(bench: Bench, hashes: bytes) -> None:
    with bench.client.put(bench.space, hashes) as put:
        for block in put.blocks:
            block.done()


def _resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(r"RssAnon:\s+(\d+) kB", status)[0]) << 10


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    columns = ("lookup", "acquire", "reserve", "commit", "release", "evict")
    how = "compiled" if figures["compiled_library"] else "without the compiled library"
    print(f"Microseconds a block in batches of {BATCH_BLOCKS}, medians ({how}); evict: reserving where each block pushes one out\n")
    heads = "  ".join(f"{what:>8}" for what in columns)
    print(f"{'blocks':>10}  {heads}  {'longest ms':>10}  {'once':>6}  {'bytes/block':>11}")
    for blocks, row in figures["by_blocks"].items():
        cells = "  ".join(f"{row.get(f'{what}_us_per_block', float('nan')):8.3f}" for what in columns)
        longest = f"{row['longest_ms']:10.1f}  {row['longest_once_ms']:6.1f}"
        print(f"{blocks:>10}  {cells}  {longest}  {row['bytes_per_block']:11.0f}  {_longest(row)}")
    if "start_s" in figures:
        print(f"\n{figures['start_blocks']} blocks on disk: first lookup {figures['start_s']:.2f} s after the daemon was killed,")
        print(f"records read at {figures['start_records_per_s'] / 1e6:.2f} million a second")
        for name, call, echo in LOOKUPS:
            told = []
            for kind, whose in (("", "that nobody asked for before"), ("_again", "that was asked for just before")):
                call_ms, echo_ms = (figures[f"{each}{kind}_{BATCH_BLOCKS}_p50_ms"] for each in (call, echo))
                told.append(f"{call_ms:.2f} ms, {call_ms / echo_ms:.2f} x an empty call, of a chain {whose}")
            print(f"lookup of {BATCH_BLOCKS} of them over {name}: {'; '.join(told)}")


def _longest(row: dict[str, Any]) -> str:
    by: dict[str, float] = row["longest_ms_by"]
    return f"(longest: {max(by, key=lambda what: by[what])})"


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
