"""A long siege: `python -m tests.hostile --messages 1000000`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.hostile import siege


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--processes", type=int, default=2, help="attackers at once")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvstore-hostile-") as directory:
        outcome = siege.run(Path(directory), args.messages, args.seed, args.processes)
    for name, value in vars(outcome).items():
        print(f"{name:>20}  {len(value) if name == 'faults' else value}")
    for fault in outcome.faults[:40]:
        print(fault)
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
