"""`kvstore fsck DIR`: is everything on disk as it was written?"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from kvstore.config import format_bytes
from kvstore.geometry import UNIT_BYTES
from kvstore.tiers import nvme_check, nvme_directory

NAME = "fsck"
HELP = """Verify every block in an nvme directory.

Reads each block and compares it with its checksum. Only while no daemon has the directory.
Exit status: 0 all is well, 1 problems were found (repaired or not), 2 it could not be checked."""

EXIT_PROBLEMS = 1  # exit status; 2 comes from the dispatcher
SHOWN_HASH_BYTES = 6  # bytes of a hash that are printed: enough to find it in a log
MAX_SHOWN_BLOCKS = 100  # bad blocks listed one by one; the rest are counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory given to kvstore serve --nvme")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--repair", action="store_true", help="forget bad blocks and records; their slots become free")
    action.add_argument("--clear", action="store_true", help="remove all blocks, whatever version of kvstore wrote them")


def run(args: argparse.Namespace) -> int:
    """Check, repair or clear; returns the exit status. Raises ConfigError while a daemon has the directory."""
    if args.clear:
        removed = nvme_directory.clear(args.directory)
        print(f"{args.directory}: removed {', '.join(removed)}")
        return 0
    report = asyncio.run(nvme_check.check(args.directory, repair=args.repair, progress=_progress))
    for line in lines(report):
        print(line)
    return EXIT_PROBLEMS if report.problems else 0


def lines(report: nvme_check.Report) -> list[str]:
    """The report for a person."""
    text = [f"{report.blocks} blocks, {format_bytes(report.block_bytes)}; {len(report.bad)} bad"]
    text += [
        f"  bad block {block.hash[:SHOWN_HASH_BYTES].hex()}… at byte {block.units * UNIT_BYTES}: {block.reason}"
        for block in report.bad[:MAX_SHOWN_BLOCKS]
    ]
    if len(report.bad) > MAX_SHOWN_BLOCKS:
        text.append(f"  and {len(report.bad) - MAX_SHOWN_BLOCKS} more")
    counts = {
        "torn records": report.torn_records,
        "records of another place, a forgotten namespace, or beyond the end of the data": report.misplaced_records,
        "older copies of blocks": report.superseded_records,
        "quarantined slots (no fault of the directory)": report.quarantined_slots,
    }
    text += [f"{count} {what}" for what, count in counts.items() if count]
    if not report.clean:
        text.append("the last stop was not a clean one")
    if report.problems:
        text.append("repaired: these are forgotten" if report.repaired else "run again with --repair to forget these")
    return text


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{total} blocks", end="\n" if done == total else "", file=sys.stderr, flush=True)
