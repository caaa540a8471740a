"""`kvstore bench replay`: a trace through the real cache core, for a grid of sizes and policies. docs/replay.md says how to read it."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstore.bench.replay_machine import Machine
from kvstore.bench.replay_plot import draw_png, need_matplotlib, terminal_plot
from kvstore.bench.replay_report import Row, as_json, header, line, summary
from kvstore.bench.replay_tiers import OPTIMUM, Outcome, Replay, Setup
from kvstore.bench.replay_trace import BLOCK_TOKENS, EXCERPT, Trace, read_trace
from kvstore.cache.eviction.choice import POLICIES
from kvstore.config import parse_bytes
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.geometry import Geometry

NAME = "replay"
HELP = """How much of a trace's prompts a cache of each size would have kept from being computed.

The trace is in the JSON-lines format of Mooncake's FAST'25 traces. It goes through the store's own cache core, over tiers
without bytes: every eviction is decided by the code that the daemon runs. `optimum` knows the future; it is the yardstick.

  kvstore bench replay
  kvstore bench replay --trace conversation_trace.jsonl --dram 256GiB,1TiB --nvme 0,4TiB --png curve.png --json rows.json"""

DRAM_SIZES = "64GiB,128GiB,256GiB,512GiB,1TiB"
NVME_SIZES = "0,4TiB"
_SPEEDS = {  # flag: what it means; decimal gigabytes
    "dram_bytes_per_s": ("--dram-gbps", "GB/s from host memory to the GPU"),
    "nvme_read_bytes_per_s": ("--nvme-read-gbps", "GB/s that the disk reads; 0: at once"),
    "nvme_write_bytes_per_s": ("--nvme-write-gbps", "GB/s that the disk writes; 0: at once"),
}
_NUMBERS = {
    "token_bytes": ("--token-bytes", "bytes of KV per token; the default is Llama-3-8B's"),
    "prefill_tokens_per_s": ("--prefill-tokens-per-s", "tokens computed per second at a short context"),
    "quadratic_tokens": ("--quadratic-tokens", "context at which attention costs as much as the rest"),
    "acquire_timeout_s": ("--acquire-timeout-s", "the longest that a prompt waits for the disk"),
}


@dataclass(frozen=True)
class Job:
    """One cell of the grid. `unlimited`: dram as large as all of the trace."""

    setup: Setup
    unlimited: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the trace, the grid, the machine and where results go."""
    parser.add_argument("--trace", type=Path, default=EXCERPT, metavar="FILE", help="the trace (default: the excerpt that comes along)")
    parser.add_argument("--requests", type=int, default=0, metavar="COUNT", help="replay only so many requests; 0: all (default)")
    grid = parser.add_argument_group("the grid")
    grid.add_argument("--dram", default=DRAM_SIZES, metavar="SIZE,...", help="sizes of host memory (default %(default)s)")
    grid.add_argument("--nvme", default=NVME_SIZES, metavar="SIZE,...", help="sizes of the disk; 0: none (default %(default)s)")
    every = ",".join([*POLICIES, OPTIMUM])
    grid.add_argument("--policies", default=every, metavar="NAME,...", help="who is evicted (default %(default)s)")
    when = "when blocks go to the disk (default %(default)s)"
    grid.add_argument("--nvme-write", default="through", choices=("through", "on_evict"), help=when)
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--config", metavar="CONFIG.json", help="a Hugging Face config.json to take the bytes per token from")
    for name, (flag, text) in _SPEEDS.items():
        default = getattr(Machine, name) / 1e9
        machine.add_argument(flag, type=float, default=default, metavar="GB/S", help=f"{text} (default %(default)g)")
    for name, (flag, text) in _NUMBERS.items():
        machine.add_argument(flag, type=float, default=getattr(Machine, name), metavar="NUMBER", help=f"{text} (default %(default)g)")
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    out.add_argument("--png", type=Path, metavar="FILE", help="draw the curves there; needs matplotlib")
    out.add_argument("--jobs", type=int, default=1, metavar="COUNT", help="replays at once (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Replay the grid, printing each row as it is known; then the curves."""
    machine, jobs = machine_of(args), _positive("--jobs", args.jobs)
    if args.png:
        need_matplotlib()
    trace = read_trace(args.trace, args.requests)
    if not trace.touched_blocks:
        raise InvalidArgument(f"{args.trace}: no blocks in it; name a trace with requests")
    grid = grid_of(args, trace, machine)
    print("\n".join([*summary(trace, machine), "", *header()]), flush=True)
    rows = []
    for job, outcome in outcomes(trace, machine, grid, jobs):
        rows.append(Row(job.setup, job.unlimited, outcome, trace, machine))
        print(line(rows[-1]), flush=True)
    print()
    print("\n".join(terminal_plot(rows)))
    if args.json:
        _write(args.json, json.dumps(as_json(trace, machine, rows), indent=2) + "\n")
    if args.png:
        draw_png(args.png, rows)
    return 0


def outcomes(trace: Trace, machine: Machine, grid: list[Job], jobs: int) -> Iterator[tuple[Job, Outcome]]:
    """Each cell of the grid with what came of it, in the grid's order."""
    if jobs == 1:
        yield from ((job, Replay(trace, job.setup, machine).run()) for job in grid)
        return
    with ProcessPoolExecutor(jobs, initializer=_remember, initargs=(trace, machine)) as pool:
        yield from zip(grid, pool.map(_replay, [job.setup for job in grid]), strict=True)


_shared: list[tuple[Trace, Machine]] = []  # in a worker process: what all its jobs replay


def _remember(trace: Trace, machine: Machine) -> None:
    _shared.append((trace, machine))


def _replay(setup: Setup) -> Outcome:
    trace, machine = _shared[0]
    return Replay(trace, setup, machine).run()


def machine_of(args: argparse.Namespace) -> Machine:
    """The machine that the flags describe. Raises InvalidArgument for speeds and sizes that cannot be."""
    values: dict[str, Any] = {}
    for name, (flag, _) in (*_SPEEDS.items(), *_NUMBERS.items()):
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if not 0 <= value < math.inf or (value == 0 and not name.startswith("nvme")):
            raise InvalidArgument(f"{flag} is {value:g}; give a number above 0")
        values[name] = (value * 1e9 or math.inf) if name in _SPEEDS else value
    values["token_bytes"] = int(values["token_bytes"])
    if args.config:
        values["token_bytes"] = Geometry.from_hf_config(_read_config(Path(args.config)), None, BLOCK_TOKENS).bytes_per_token
    return replace(Machine(), **values)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}; give the path of a config.json") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path}: holds no JSON object; give the path of a config.json")
    return config


def grid_of(args: argparse.Namespace, trace: Trace, machine: Machine) -> list[Job]:
    """First a cache of everything, then each combination of sizes and policies. Sizes are cut down to whole blocks."""
    policies = args.policies.split(",")
    if unknown := [name for name in policies if name not in (*POLICIES, OPTIMUM)]:
        raise InvalidArgument(f"--policies: {unknown[0]!r} is none; give some of {', '.join([*POLICIES, OPTIMUM])}")
    dram = [_blocks("--dram", size, machine) for size in args.dram.split(",")]
    nvme = [_blocks("--nvme", size, machine) for size in args.nvme.split(",")]
    if not all(dram):
        raise InvalidArgument(f"--dram: a block takes {machine.block_bytes} bytes; give room for at least one")
    grid = [Job(Setup(trace.distinct_blocks, 0, policies[0]), unlimited=True)]
    return grid + [Job(Setup(most, disk, policy, args.nvme_write)) for disk in nvme for most in dram for policy in policies]


def _blocks(flag: str, size: str, machine: Machine) -> int:
    try:
        return parse_bytes(size) // machine.block_bytes
    except ConfigError as error:
        raise InvalidArgument(f"{flag}: {error}") from error


def _positive(flag: str, value: int) -> int:
    if value < 1:
        raise InvalidArgument(f"{flag} is {value}; give at least 1")
    return value


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}; name a file that can be written") from error
