"""Where the daemon is, for commands that only ask it. No command of its own."""

import argparse

HELP = "the daemon's socket, or host:port (default: KVSTORE_LISTEN, or the daemon's own default)"


def add_address_argument(parser: argparse.ArgumentParser) -> None:
    """Declare it; also under the name that `kvstore serve` has for it."""
    parser.add_argument("--address", "--listen", metavar="SOCKET", help=HELP)
