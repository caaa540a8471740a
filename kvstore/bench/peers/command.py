"""`kvstore bench peers`: what there is to type, and the list of peers."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

from kvstore.bench.peers.measure import OURS, Kind, driver, measure, ours
from kvstore.bench.peers.report import figures, show
from kvstore.bench.peers.work import Work, prefix
from kvstore.config import format_bytes, parse_bytes

NAME = "peers"
HELP = """This store beside LMCache's server, Mooncake Store and Redis, on the same work, by turns, in one run.

Each peer runs in a venv of its own (.venv-lmcache, .venv-mooncake, .venv-redis), which `make bench-peers` makes. One that is not
there, or cannot run, is reported with the reason. Takes about ten times the memory of --bytes; nothing else should run meanwhile."""

PREFIX_TOKENS = 32_768  # tokens of the prefix that is looked up: a long prompt
CHUNK_BLOCKS = 16  # blocks: 256 tokens, which LMCache keeps as one; the larger objects that Mooncake gets


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures and samples there")
    parser.add_argument("--bytes", metavar="SIZE", type=parse_bytes, default=1 << 30, help="stored and retrieved a round (default 1GiB)")
    parser.add_argument("--tokens", metavar="N", type=int, default=PREFIX_TOKENS, help="of the prefix looked up (default %(default)s)")
    parser.add_argument("--rounds", metavar="N", type=int, default=5, help="that are counted (default %(default)s)")
    parser.add_argument("--venvs", metavar="DIR", type=Path, default=Path("."), help="where the peers' venvs lie (default: here)")
    parser.add_argument("--only", metavar="PEERS", default="", help="of these peers, separated by commas (default: all)")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, write the JSON. Returns 0, or 1 where this store itself did not run."""
    chunk_tokens = CHUNK_BLOCKS * Work.block_tokens
    data, looked_up = Work(_whole(args.bytes, Work(1).block_bytes)), prefix(_whole(args.tokens, 1, chunk_tokens))
    wanted = {name for name in args.only.split(",") if name}
    kinds = [ours(), *(kind for kind in peers(args.venvs) if not wanted or kind.name in wanted)]
    print(
        f"{format_bytes(data.size_bytes)} of a Llama-3-8B's KV a round, {data.blocks} blocks of 16 tokens;"
        f" a prefix of {looked_up.tokens} tokens; medians of {args.rounds} rounds (least-most)\n"
    )
    with tempfile.TemporaryDirectory(prefix="kvstore-peers-") as directory:
        results, memcpy = measure(kinds, data, looked_up, args.rounds, Path(directory))
    found = {
        "moved_bytes": data.size_bytes,
        "prefix_tokens": looked_up.tokens,
        "rounds": args.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **figures(results, memcpy),
    }
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    show(found)
    return 1 if next(each for each in results if each.name == OURS).reason else 0


def peers(venvs: Path) -> list[Kind]:
    """All that are known, each with the Python of its venv."""

    def python(name: str) -> Path:
        return (venvs / f".venv-{name}" / "bin" / "python").absolute()

    # Mooncake's library of RDMA verbs is looked for in its venv too, where the system lacks it.
    libraries = [str(path) for path in (venvs / ".venv-mooncake" / "libraries").absolute().glob("**/*-linux-gnu")]
    search = ":".join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return [
        Kind("lmcache", driver(python("lmcache"), "drive_lmcache")),
        Kind("mooncake", driver(python("mooncake"), "drive_mooncake", {"LD_LIBRARY_PATH": search}), (1, CHUNK_BLOCKS)),
        Kind("redis", driver(python("redis"), "drive_redis")),
    ]


def _whole(size: int, unit: int, multiple: int = CHUNK_BLOCKS) -> int:
    """How many units, in whole chunks and at least one: a part of a chunk would not be kept by every peer."""
    return max(multiple, size // unit // multiple * multiple)
