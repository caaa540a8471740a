"""`kvstore demo`: watch a second process start a long prompt many times sooner because the first one had computed it."""

import argparse
import importlib.util
import signal
import sys
import time
from pathlib import Path

from kvstore.errors import ConfigError

NAME = "demo"
HELP = """Start a daemon and two workers, and measure how soon a long prompt's first token comes.

Without the store, cold, again in the same worker, in another worker, and after the daemon was killed and started again on the same
disk. It compares every answer with transformers without the store, to the last bit. Takes a few minutes, 3 GB of memory and 1 GiB
of disk; all of it is given back at the end. The exit status is 1 where an answer differed.
"""
_NEEDED = ("torch", "transformers", "safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures to FILE instead of showing them")


def run(args: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo's workers need {', '.join(missing)}; pip install 'kvstore[worker]'")
    from kvstore.cli import demo_measure, demo_picture

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes end with it
    began_at = time.monotonic()
    figures = demo_measure.measure(lambda line: print(f"… {time.monotonic() - began_at:3.0f} s: {line}", file=sys.stderr, flush=True))
    if args.json:
        demo_measure.write_json(figures, args.json)
    else:
        print(demo_picture.picture(figures))
    return 0 if figures.identical() else 1
