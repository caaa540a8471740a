"""`kvstore lookup`: how much of a sequence is stored, and where."""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

from kvstore.cli.model_arguments import add_namespace_arguments, geometry_of, identity_of
from kvstore.errors import ConfigError
from kvstore.hashing import HASH_BYTES, usable_blocks

NAME = "lookup"
HELP = """How many leading blocks of a sequence are stored, and in which tier each is; as JSON.

Takes no lease and moves nothing.

  kvstore lookup --identity identity.json --geometry config.json --tokens prompt.txt
  kvstore lookup --identity identity.json --geometry config.json --hashes chain.hex"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sequence, its namespace and where the daemon is."""
    parser.add_argument("--address", metavar="SOCKET", help="the daemon's socket, or host:port (default: the daemon's own default)")
    sequence = parser.add_mutually_exclusive_group(required=True)
    sequence.add_argument("--tokens", metavar="FILE", help="token ids, as JSON or separated by spaces or commas; - reads standard input")
    sequence.add_argument("--hashes", metavar="FILE", help="block hashes in hexadecimal, one a line; - reads standard input")
    add_namespace_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Look up and print; exit status 0 also where nothing is stored."""
    from kvstore.clients.client import KVClient

    identity, geometry = identity_of(args), geometry_of(args)
    with KVClient(args.address) as client:
        namespace = client.open_namespace(identity, geometry, args.shard)
        if args.hashes:
            hashes = _hashes(_text(args.hashes))
            asked, found = len(hashes) // HASH_BYTES, client.lookup(namespace, hashes)
        else:
            tokens = _tokens(_text(args.tokens))
            asked, found = usable_blocks(len(tokens), geometry.block_tokens), client.lookup(namespace, tokens=tokens)
    report = {
        "namespace": namespace.digest.hex(),
        "blocks": found.blocks,
        "asked_blocks": asked,
        "tokens": found.blocks * geometry.block_tokens,
        "bytes": found.blocks * geometry.block_bytes,
        "tiers": dict(Counter(found.tiers)),
    }
    print(json.dumps(report, indent=2))
    return 0


def _text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _tokens(text: str) -> list[int]:
    words = re.split(r"[\s,\[\]]+", text.strip("[] \n\t,"))
    try:
        return [int(word) for word in words if word]
    except ValueError as error:
        raise ConfigError(f"--tokens: {error}; give token ids, not text") from error


def _hashes(text: str) -> bytes:
    try:
        hashes = [bytes.fromhex(line) for line in text.split()]
    except ValueError as error:
        raise ConfigError(f"--hashes: {error}; give 64 hexadecimal digits a line") from error
    if any(len(each) != HASH_BYTES for each in hashes):
        raise ConfigError("--hashes: a line is no hash; give 64 hexadecimal digits a line")
    return b"".join(hashes)
