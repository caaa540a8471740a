"""Runs seeds: one, to see why it fails, or many, to see whether any does.

    python -m tests.simulation 17 --verbose           every step of one run, and the core's story of the block concerned
    python -m tests.simulation 0 --count 2000         so many, on all processors
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.scene import Report, play

SEEDS_A_PIECE = 10  # seeds that a worker takes at once


def main() -> int:
    """The exit status: 1 where a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("seed", type=int, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--verbose", action="store_true", help="print every step")
    args = parser.parse_args()
    if args.count == 1:
        return show(play(args.seed, args.verbose))
    return many(range(args.seed, args.seed + args.count), args.jobs, args.first)


def show(report: Report) -> int:
    """One run, in full."""
    for line in report.story:
        print(line)
    if report.failure is None:
        print(f"seed {report.seed}: {report.steps} steps, {report.served} blocks looked at; {reached(report.reached)}")
        return 0
    print(failed(report))
    print("\n".join(report.trace))
    if report.block_story:
        print(f"the story of block {report.failure.key.hex()[:12]}:\n{report.block_story}")
    return 1


def many(seeds: range, jobs: int, first: bool) -> int:
    """Many runs, in short."""
    began = time.perf_counter()
    total: Counter[str] = Counter()
    steps = served = failures = done = 0
    with ProcessPoolExecutor(jobs) as pool:
        for report in pool.map(play, seeds, chunksize=1 if first else SEEDS_A_PIECE):
            done, steps, served = done + 1, steps + report.steps, served + report.served
            total += report.reached
            if report.failure is not None:
                failures += 1
                print(failed(report), flush=True)
                if first:
                    pool.shutdown(cancel_futures=True)
                    break
    took_s = time.perf_counter() - began
    print(f"{done} seeds, {failures} failed, {steps} steps, {served} blocks looked at, {took_s:.0f} s; {reached(total)}")
    return 1 if failures else 0


def failed(report: Report) -> str:
    """What went wrong, and how to see it again."""
    return f"seed {report.seed} failed: {report.failure}\n  replay: python -m tests.simulation {report.seed} --verbose"


def reached(counts: Counter[str]) -> str:
    """What happened how often."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)


if __name__ == "__main__":
    sys.exit(main())
