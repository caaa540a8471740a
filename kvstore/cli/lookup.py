"""`kvstore lookup`: how much of a sequence is stored, and where."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.cli.address import add_address_argument
from kvstore.cli.model_arguments import add_namespace_arguments, opened
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.hashing import HASH_BYTES, Identity, usable_blocks

if TYPE_CHECKING:
    from kvstore.clients.handles import Namespace

NAME = "lookup"
HELP = """How many leading blocks of a sequence are stored, and in which tier each is; as JSON.

Takes no lease and moves nothing. `kvstore explain`, with the same arguments, says why no more is found. Tokens are of a prompt without
adapter and salt, unless those are given. SGLang and vLLM's offloading tier name blocks themselves: of theirs only hashes can be asked for.

  kvstore lookup --namespace 3f2a --tokens prompt.txt                    one that `kvstore namespaces` lists
  kvstore lookup --identity identity.json --geometry config.json --tokens prompt.txt
  kvstore lookup --identity identity.json --geometry config.json --hashes chain.hex"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the sequence, its namespace and where the daemon is. `kvstore explain` has them too."""
    add_address_argument(parser)
    sequence = parser.add_mutually_exclusive_group(required=True)
    sequence.add_argument("--tokens", metavar="FILE", help="token ids, as JSON or separated by spaces or commas; - reads standard input")
    sequence.add_argument("--hashes", metavar="FILE", help="block hashes in hexadecimal, one a line; - reads standard input")
    parser.add_argument("--adapter", metavar="DIGEST", help="with --tokens: the adapter that the request uses, as its engine names it")
    parser.add_argument("--salt", help="with --tokens: the request's salt")
    add_namespace_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Look up and print; exit status 0 also where nothing is stored."""
    from kvstore.clients.client import KVClient

    hashes, tokens = sequence_of(args)
    with KVClient(args.address) as client:
        namespace = opened(client, args)
        geometry = namespace.geometry
        asked = usable_blocks(len(tokens), geometry.block_tokens) if tokens is not None else len(hashes or b"") // HASH_BYTES
        found = client.lookup(namespace, hashes, tokens=tokens, identity=identity_in(namespace, args))
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
    """The hashes or the tokens that the arguments name, one of them. Raises ConfigError, InvalidArgument."""
    if args.hashes and (args.adapter is not None or args.salt is not None):
        raise InvalidArgument("--hashes are of one adapter and salt already; leave out --adapter and --salt")
    return (_hashes(_text(args.hashes)), None) if args.hashes else (None, _tokens(_text(args.tokens)))


def identity_in(namespace: Namespace, args: argparse.Namespace) -> Identity:
    """The namespace's, with the adapter and salt that the arguments name. Raises InvalidArgument where tokens do not tell blocks' names."""
    from kvstore.clients import sglang_facts, vllm_tier_facts

    form = namespace.geometry.format
    if args.tokens and form.startswith((sglang_facts.FORMAT, vllm_tier_facts.FORMAT)):
        raise InvalidArgument(f"--tokens: blocks of {form} are named by hashes of the engine's own; give those with --hashes")
    given = {name: value for name, value in (("adapter", args.adapter), ("salt", args.salt)) if value is not None}
    return replace(namespace.identity, **given)


def _text(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: no text ({error}); give a file of text") from error


def _tokens(text: str) -> list[int]:
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    wrong = next((word for word in words if not re.fullmatch(r"-?[0-9]{1,20}", word)), None)
    if wrong is not None:
        raise ConfigError(
            f"--tokens: {wrong[:40]!r} is no token id; give token ids, not text: those that the model's tokenizer makes of it"
        )
    return [int(word) for word in words]


def _hashes(text: str) -> bytes:
    try:
        hashes = [bytes.fromhex(line) for line in text.split()]
    except ValueError as error:
        raise ConfigError("--hashes: a line is not hexadecimal; give 64 hexadecimal digits a line") from error
    if any(len(each) != HASH_BYTES for each in hashes):
        raise ConfigError("--hashes: a line is no hash; give 64 hexadecimal digits a line")
    return b"".join(hashes)
