"""`kvstore clear`: forget every block, in every tier, for good."""

import argparse
import sys

from kvstore.cli.address import add_address_argument
from kvstore.cli.model_arguments import add_namespace_arguments, names_namespace, opened
from kvstore.config import format_bytes

NAME = "clear"
HELP = """Forget every block of one namespace, or of all, in every tier, for good.

  kvstore clear                                                          everything, after asking
  kvstore clear --namespace 3f2a --yes                                   one that `kvstore namespaces` lists, without asking
  kvstore clear --identity identity.json --geometry config.json --yes    one namespace, named by its facts"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what to clear and whether to ask."""
    add_address_argument(parser)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_namespace_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask, clear, and say what was cleared; exit status 1 where the answer was no."""
    from kvstore.clients.client import KVClient

    named = names_namespace(args)
    with KVClient(args.address) as client:
        namespace = opened(client, args) if named else None
        if not args.yes and not _agreed("every block of this namespace" if namespace else "every block that the daemon has"):
            print("nothing was cleared")
            return 1
        cleared = client.clear(namespace)
    print(f"cleared {cleared.blocks} blocks: {format_bytes(cleared.dram_bytes)} in dram, {format_bytes(cleared.nvme_bytes)} on nvme")
    if namespace and not cleared.blocks and not args.namespace:
        print("the namespace was empty; see that the identity, geometry and shard are those of the engine", file=sys.stderr)
    if cleared.held_blocks:
        print(f"{cleared.held_blocks} of them are still read by attached processes: nobody finds them any more, their memory follows")
    return 0


def _agreed(what: str) -> bool:
    if not sys.stdin.isatty():
        print(f"this forgets {what}; repeat it with --yes", file=sys.stderr)
        return False
    try:
        return input(f"Forget {what}, in memory and on disk? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False
