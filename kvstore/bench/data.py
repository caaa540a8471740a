"""`kvstore bench data`: the data plane beside what memory and disk themselves do, in one run on this machine.

A real daemon process, real clients, real files. Yardstick and store alternate, each figure is the median of a few rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.echo import Echo
from kvstore.bench.step import SEQUENCES, step_figures
from kvstore.bench.yardsticks import Memcpy, RawDisk, gbps, median_ms, second_of_two_s, shared_segment, timed
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.config import format_bytes, parse_bytes
from kvstore.geometry import Geometry
from kvstore.hashing import Identity, block_hash, block_hashes
from kvstore.testing.daemon import DaemonProcess

NAME = "data"
HELP = "Put and get through a real daemon, beside memcpy and raw O_DIRECT of the same run."

BLOCK_SIZES = {"128 KiB": 128 << 10, "720 KiB": 720 << 10, "2 MiB": 2 << 20, "32 MiB": 32 << 20}  # bytes of a block
HEADLINE = "2 MiB"  # the block size of the ratios that are quoted
BATCHES = (1, 128, 2048)  # blocks of a call whose latency is taken
CALL_KINDS = ("echo", "lookup", "acquire", "commit", "echo_socket", "lookup_socket")
ROUNDS = 5  # of each throughput figure
CALLS = 60  # of each latency figure
WARM_CALLS = 3  # before those that count
THREADS = 2  # that read and write the disk, in the daemon and in the yardstick
INDEX_BLOCKS = 262_144  # blocks: four times what fits, so that rows are never what is short
WRITE_DEADLINE_S = 120.0  # seconds for write-through to finish


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


class Bench:
    """A daemon, a client and a namespace of opaque blocks of one size."""

    def __init__(self, daemon: DaemonProcess, block_bytes: int, name: str) -> None:
        self.client = KVClient(daemon.address, name="bench")
        geometry = Geometry("mha", 1, 1, 1, 1, "uint8", 1, format="bench", opaque_block_bytes=block_bytes)
        self.space: Namespace = self.client.open_namespace(Identity(model="bench", revision=name, dtype="uint8"), geometry)

    def hashes(self, count: int, salt: int) -> bytes:
        """A chain of `count` blocks that no other salt gives."""
        root = block_hash(self.space.root, [salt])
        return block_hashes(root, np.arange(count), 1)

    def put(self, hashes: bytes, source: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Store the blocks of `source`, one after the other."""
        size = self.space.geometry.block_bytes
        with self.client.put(self.space, hashes) as put:
            put.write_all([source[at : at + size] for at in range(0, size * (len(hashes) // 32), size)])
        if put.stored * 32 != len(hashes):
            raise RuntimeError(f"{put.stored} of {len(hashes) // 32} blocks were stored: {set(put.names)}")

    def get(self, hashes: bytes, target: np.ndarray[Any, np.dtype[np.uint8]] | None) -> None:
        """Lease the blocks; copy them where a target is given."""
        size = self.space.geometry.block_bytes
        with self.client.get(self.space, hashes, timeout_s=60.0) as lease:
            if lease.blocks * 32 != len(hashes):
                raise RuntimeError(f"{lease.blocks} of {len(hashes) // 32} blocks were found")
            if target is not None:
                lease.copy_into([target[i * size : (i + 1) * size] for i in range(lease.blocks)])

    def wait_written(self, blocks: int, deadline_s: float = WRITE_DEADLINE_S) -> None:
        """Until so many blocks are on disk."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            tiers = {tier.tier: tier for tier in self.client.stats().tiers}
            if tiers["nvme"].blocks >= blocks:
                return
            time.sleep(0.004)
        raise RuntimeError(f"the blocks were not on disk after {deadline_s:.0f} s")


def wait_touched(daemon: DaemonProcess) -> None:
    """Until the arena's memory is taken: a first touch would be measured otherwise."""
    deadline = time.monotonic() + WRITE_DEADLINE_S
    while time.monotonic() < deadline:
        said = re.findall(r"dram: (\S+ \S+) of (\S+ \S+) touched", daemon.log())
        if said and said[-1][0] == said[-1][1]:
            return
        time.sleep(0.05)
    raise RuntimeError("the arena's memory was not taken in time")


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
            yield "odirect_read", disk.run(block_bytes, THREADS, write=False)
            yield "nvme_read", gbps(size_bytes, timed(lambda bench=bench, hashes=hashes: bench.get(hashes, None)))  # type: ignore[misc]
            bench.client.close()
            disk.close()


# ---- latency


def _latency(directory: Path) -> dict[int, dict[str, float]]:
    """Milliseconds of calls about many blocks of 4 KiB, beside an empty call of the same kind with a message of the same size."""
    found: dict[int, dict[str, float]] = {}
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(dir=directory))
        daemon = stack.enter_context(DaemonProcess(Path(place), ["--index-blocks", str(INDEX_BLOCKS)], dram="256MiB", nvme=False))
        bench, echo = Bench(daemon, 4096, "latency"), stack.enter_context(Echo(Path(place)))
        by_grpc = stack.enter_context(KVClient(daemon.address, name="bench, over gRPC alone"))
        by_grpc._quick.close()
        source = np.zeros(4096 * max(BATCHES), np.uint8)
        for batch in BATCHES:
            hashes = bench.hashes(batch, batch)
            bench.put(hashes, source)
            times: dict[str, list[float]] = {}
            for what, act in _acts(bench, by_grpc, hashes).items():
                kind, empty = ("echo_socket", echo.socket_ms) if what == "lookup_socket" else ("echo", echo.grpc_ms)
                for number in range(-WARM_CALLS, CALLS):
                    pair = empty(batch), 1e3 * act(number)
                    for name, value in zip((kind, what), pair, strict=True) if number >= 0 else ():
                        times.setdefault(name, []).append(value)
            found[batch] = {what: median_ms(values) for what, values in times.items()}
        bench.client.close()
    return found


def _acts(bench: Bench, by_grpc: KVClient, hashes: bytes) -> dict[str, Callable[[int], float]]:
    """What is timed, in seconds, for blocks that are stored; each is given the number of its round."""
    batch = len(hashes) // 32
    return {
        "lookup": lambda _: second_of_two_s(lambda: by_grpc.lookup(bench.space, hashes)),
        "lookup_socket": lambda _: second_of_two_s(lambda: bench.client.lookup(bench.space, hashes)),
        "acquire": lambda _: timed(lambda: bench.get(hashes, None)),
        "commit": lambda number: _commit_s(bench, bench.hashes(batch, batch + 4096 * (number + WARM_CALLS + 1))),
    }


def _commit_s(bench: Bench, hashes: bytes) -> float:
    """Seconds of the commit alone: the slots are there, and their bytes are nobody's concern here."""
    with bench.client.put(bench.space, hashes) as put:
        for block in put.blocks:
            block.done()
        began = time.perf_counter()
    return time.perf_counter() - began


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
