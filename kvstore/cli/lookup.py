"""`kvstore lookup`: how much of a sequence is stored, and where."""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

from kvstore.cli.model_arguments import add_namespace_arguments, opened
from kvstore.errors import ConfigError
from kvstore.hashing import HASH_BYTES, usable_blocks

NAME = "lookup"
HELP = """How many leading blocks of a sequence are stored, and in which tier each is; as JSON.

Takes no lease and moves nothing. `kvstore explain`, with the same arguments, says why no more is found.

  kvstore lookup --namespace 3f2a --tokens prompt.txt                    one that `kvstore namespaces` lists
  kvstore lookup --identity identity.json --geometry config.json --tokens prompt.txt
  kvstore lookup --identity identity.json --geometry config.json --hashes chain.hex"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sequence, its namespace and where the daemon is. `kvstore explain` has them too."""
    parser.add_argument("--address", metavar="SOCKET", help="the daemon's socket, or host:port (default: the daemon's own default)")
    sequence = parser.add_mutually_exclusive_group(required=True)
    sequence.add_argument("--tokens", metavar="FILE", help="token ids, as JSON or separated by spaces or commas; - reads standard input")
    sequence.add_argument("--hashes", metavar="FILE", help="block hashes in hexadecimal, one a line; - reads standard input")
    add_namespace_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Look up and print; exit status 0 also where nothing is stored."""
    from kvstore.clients.client import KVClient

    hashes, tokens = sequence_of(args)
    with KVClient(args.address) as client:
        namespace = opened(client, args)
        geometry = namespace.geometry
        asked = usable_blocks(len(tokens), geometry.block_tokens) if tokens is not None else len(hashes or b"") // HASH_BYTES
        found = client.lookup(namespace, hashes, tokens=tokens)
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


def sequence_of(args: argparse.Namespace) -> tuple[bytes | None, list[int] | None]:
    """The hashes or the tokens that the arguments name, one of them. Raises ConfigError."""
    return (_hashes(_text(args.hashes)), None) if args.hashes else (None, _tokens(_text(args.tokens)))


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
