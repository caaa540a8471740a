"""`kvstore bench data`: the data plane beside what memory and disk themselves do, in one run on this machine.

A real daemon process, real clients, real files. Yardstick and store alternate, each figure is the median of a few rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.bench import Bench, wait_touched
from kvstore.bench.calls import Calls
from kvstore.bench.step import SEQUENCES, step_figures
from kvstore.bench.yardsticks import Memcpy, RawDisk, gbps, shared_segment, timed
from kvstore.config import format_bytes, parse_bytes
from kvstore.testing.daemon import DaemonProcess

NAME = "data"
HELP = "Put and get through a real daemon, beside memcpy and raw O_DIRECT of the same run."

BLOCK_SIZES = {"128 KiB": 128 << 10, "720 KiB": 720 << 10, "2 MiB": 2 << 20, "32 MiB": 32 << 20}  # bytes of a block
HEADLINE = "2 MiB"  # the block size of the ratios that are quoted
BATCHES = (1, 128, 2048)  # blocks of a call whose latency is taken
CALL_KINDS = ("echo", "lookup", "acquire", "commit", "echo_socket", "lookup_socket")
ROUNDS = 5  # of each throughput figure
THREADS = 2  # that read and write the disk, in the daemon and in the yardstick
INDEX_BLOCKS = 262_144  # blocks: four times what fits, so that rows are never what is short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--bytes", metavar="SIZE", type=parse_bytes, default=256 << 20, help="how much each round moves (default 256MiB)")
    parser.add_argument("--dir", metavar="DIR", type=Path, default=Path("."), help="where the disk tier lies: on the disk to measure")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, write the JSON. Returns 0."""
    figures = measure(args.bytes, args.dir)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    show(figures)
    return 0


def measure(size_bytes: int, directory: Path) -> dict[str, Any]:
    """All figures; the names of the flat ones are those that the documentation quotes."""
    throughput = {name: _throughput(block, max(size_bytes, 2 * block), directory) for name, block in BLOCK_SIZES.items()}
    figures: dict[str, Any] = dict(throughput[HEADLINE])
    latency = _latency(directory)
    for batch in BATCHES:
        figures |= {f"{what}_{batch}_p50_ms": value for what, value in latency[batch].items()}
    with tempfile.TemporaryDirectory(dir=directory) as place, DaemonProcess(Path(place), dram="256MiB", nvme=False) as daemon:
        figures |= step_figures(daemon.address)
    return figures | {"by_block_size": throughput, "by_batch": latency, "moved_bytes": size_bytes}


# ---- throughput


def _throughput(block_bytes: int, size_bytes: int, directory: Path) -> dict[str, float]:
    count = size_bytes // block_bytes
    flags = ["--nvme-threads", str(THREADS), "--nvme-write-bytes-per-s", "1TiB", "--dram-extent-bytes", str(max(32 << 20, block_bytes))]
    dram = f"{(2 * count + 40) * block_bytes + (128 << 20)}"
    with tempfile.TemporaryDirectory(dir=directory) as place, shared_segment(size_bytes) as source, shared_segment(size_bytes) as target:
        source[:] = np.arange(len(source), dtype=np.uint64).view(np.uint8)[: len(source)]
        samples: dict[str, list[float]] = {}
        for name, value in _rounds(Path(place), dram, flags, block_bytes, count, (source, target)):
            samples.setdefault(name, []).append(value)
    median = {name: statistics.median(values) for name, values in samples.items()}
    ratios = {
        "dram_put_ratio": median["put"] / median["memcpy"],
        "dram_get_ratio": median["get"] / median["memcpy"],
        "nvme_write_ratio": median["nvme_write"] / median["odirect_write"],
        "nvme_read_ratio": median["nvme_read"] / median["odirect_read"],
    }
    yardsticks = {f"{name}_gbps": median[name] for name in ("memcpy", "odirect_write", "odirect_read")}
    return {name: round(value, 3) for name, value in (yardsticks | ratios | {"zero_copy_get_ms": median["zero_copy_get_ms"]}).items()}


def _rounds(
    place: Path, dram: str, flags: list[str], block_bytes: int, count: int, segments: tuple[Any, Any]
) -> Iterator[tuple[str, float]]:
    """Yardstick and store by turns: (name, GB/s) each time. Both write into new files, whose first writes cost more."""
    source, target = segments
    memcpy = Memcpy(source, target)
    size_bytes = count * block_bytes
    nvme_bytes = str(4 * size_bytes + (256 << 20))
    for number in range(ROUNDS):
        with DaemonProcess(place / f"daemon{number}", flags, dram=dram, nvme_bytes=nvme_bytes) as daemon:
            wait_touched(daemon)
            bench = Bench(daemon, block_bytes, str(number))
            hashes = bench.hashes(count, number)
            warm = bench.hashes(4, 4000 + number)  # the session, the maps, and the code's first time
            bench.put(warm, source)
            bench.get(warm, None)
            yield "memcpy", memcpy.run(block_bytes, 1)
            began = time.perf_counter()
            bench.put(hashes, source)
            yield "put", gbps(size_bytes, time.perf_counter() - began)
            began = time.perf_counter()  # a block is written down once it is committed
            bench.wait_written(len(hashes + warm) // 32)
            yield "nvme_write", gbps(size_bytes, time.perf_counter() - began)
            disk = RawDisk(place, source)
            yield "odirect_write", disk.run(block_bytes, THREADS, write=True)
            yield "get", gbps(size_bytes, timed(lambda bench=bench, hashes=hashes: bench.get(hashes, target)))  # type: ignore[misc]
            yield "zero_copy_get_ms", 1e3 * timed(lambda bench=bench, hashes=hashes: bench.get(hashes, None))  # type: ignore[misc]
            bench.client.close()
            daemon.restart(kill=False)
            bench = Bench(daemon, block_bytes, str(number))
            bench.get(warm, None)
            raw, ours = partial(disk.run, block_bytes, THREADS, write=False), partial(_read_gbps, bench, hashes, size_bytes)
            reads: list[tuple[str, Callable[[], float]]] = [("odirect_read", raw), ("nvme_read", ours)]
            for name, read in reads if number % 2 else reversed(reads):  # a cloud's disk gives more to whoever comes first
                yield name, read()
            bench.client.close()
            disk.close()


def _read_gbps(bench: Bench, hashes: bytes, size_bytes: int) -> float:
    return gbps(size_bytes, timed(lambda: bench.get(hashes, None)))


# ---- latency


def _latency(directory: Path) -> dict[int, dict[str, float]]:
    """Milliseconds of calls about many blocks of 4 KiB, beside an empty call of the same kind with a message of the same size."""
    found: dict[int, dict[str, float]] = {}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        daemon = stack.enter_context(DaemonProcess(place, ["--index-blocks", str(INDEX_BLOCKS)], dram="256MiB", nvme=False))
        bench = Bench(daemon, 4096, "latency")
        calls = stack.enter_context(Calls(daemon, bench, place))
        source = np.zeros(4096 * max(BATCHES), np.uint8)
        for batch in BATCHES:
            hashes = bench.hashes(batch, batch)
            bench.put(hashes, source)
            found[batch] = calls.lookups([hashes]) | calls.leases(hashes)
        bench.client.close()
    return found


# ---- on the screen


def show(figures: dict[str, Any]) -> None:
    """Print the tables."""
    print(f"{format_bytes(figures['moved_bytes'])} a round, medians of {ROUNDS}; GB/s, and ratios to the yardstick of the same run\n")
    columns = ["memcpy_gbps", "dram_put_ratio", "dram_get_ratio"]
    columns += ["odirect_write_gbps", "nvme_write_ratio", "odirect_read_gbps", "nvme_read_ratio"]
    print(f"{'block':>8}  " + "  ".join(f"{column:>18}" for column in columns))
    for name, row in figures["by_block_size"].items():
        print(f"{name:>8}  " + "  ".join(f"{row[column]:18.2f}" for column in columns))
    print("\nMilliseconds a call, median; echo is an empty call of gRPC with a message of the same size, echo_socket one over the plain")
    print("socket that lookups of clients on this machine take\n")
    print(f"{'blocks':>8}  " + "  ".join(f"{what:>13}" for what in CALL_KINDS))
    for batch, row in figures["by_batch"].items():
        print(f"{batch:>8}  " + "  ".join(f"{row[what]:13.3f}" for what in CALL_KINDS))
    step, empty = figures["step_p50_ms"], figures["round_trip_p50_ms"]
    print(f"\nA decode step's message ({SEQUENCES} reserves, commits and releases): {step:.2f} ms, an empty one {empty:.2f}")
