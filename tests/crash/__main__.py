"""A long storm: `python -m tests.crash --kills 300`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.crash.storm import Storm


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=300, help="how often the daemon is killed")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the random choices; the moments themselves vary")
    parser.add_argument("--keep", action="store_true", help="leave the directory for a look")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvstore-crash-"))
    tally = Storm(directory, args.seed).run(args.kills)
    for name, value in vars(tally).items():
        print(f"{name:>22}  {value if name != 'faults' else len(value)}")
    for fault in tally.faults:
        print(fault)
    if args.keep or tally.faults:
        print(f"seed {args.seed}, left in {directory}")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
