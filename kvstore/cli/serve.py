"""`kvstore serve`: run the daemon."""

import argparse

from kvstore import config

NAME = "serve"
HELP = """Run the daemon: it keeps blocks in host memory and on disk for every engine of this machine.

Every setting can come from the settings file, the environment (KVSTORE_DRAM_BYTES=8GiB) or a flag; a flag wins.
Stop it with SIGTERM or Ctrl-C: it finishes its writes, and what is on disk is there again at the next start.

  kvstore serve --dram 8GiB --nvme /var/lib/kvstore --nvme-bytes 100GiB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    config.add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    from kvstore.daemon import server

    server.run(config.load(args), lambda line: print(line, flush=True))
    return 0
