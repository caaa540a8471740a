"""`kvstore explain`: why no more of a prompt is found."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from kvstore.cli import lookup
from kvstore.cli.model_arguments import opened
from kvstore.cli.text import shown

if TYPE_CHECKING:
    from kvstore.hashing import Identity
    from kvstore.proto import kvstore_pb2 as pb

NAME = "explain"
HELP = """Why no more of a prompt is found, and under which other model, revision, dtype, layout or shard more of it is.

With --tokens every namespace is tried, under the prompt's adapter and salt and without them; with --hashes only the namespaces in which
blocks have the same names. Tokens are of a prompt without adapter and salt, unless those are given: the store cannot tell other salts.

  kvstore explain --namespace 3f2a --tokens prompt.txt                   one that `kvstore namespaces` lists
  kvstore explain --identity identity.json --geometry config.json --tokens prompt.txt"""
NO_BLOCK = "the prompt has no whole block before its last token, which is always computed: nothing of it can be stored"
REASONS = {
    "being_written": "another client is writing it now",
    "evicted": "it was stored, and evicted to make room",
    "removed": "it was stored, and removed: cleared, or its bytes were wrong",
    "not_stored": "it was never stored here, or left longer ago than the daemon remembers",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `kvstore lookup`, and how to print."""
    lookup.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(args: argparse.Namespace) -> int:
    """Ask and print; exit status 0 also where nothing is found."""
    from google.protobuf.json_format import MessageToDict

    from kvstore.clients.client import KVClient

    hashes, tokens = lookup.sequence_of(args)
    with KVClient(args.address) as client:
        namespace = opened(client, args)
        identity = lookup.identity_in(namespace, args)
        reply = client.explain(namespace, hashes, tokens=tokens, identity=identity)
        known = {each.digest: dict(each.facts) for each in client.namespaces().namespaces}
    if args.json:
        facts = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for each, place in zip(facts["elsewhere"], reply.elsewhere, strict=True):
            each["digest"], each["tokens"] = place.digest.hex(), place.tokens  # of 64 bits, which JSON in protobuf writes as text
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_told(reply, namespace.geometry.block_tokens, known.get(namespace.digest, {}), identity if args.tokens else None)))
    return 0


def _told(reply: pb.ExplainReply, block_tokens: int, mine: dict[str, str], identity: Identity | None) -> list[str]:
    """Lines. `identity` is the prompt's, None where its hashes were given."""
    if not reply.asked_blocks:
        return [NO_BLOCK if identity else "the file has no hashes"]
    lines = [f"{reply.blocks} of {reply.asked_blocks} blocks ({reply.blocks * block_tokens} tokens) are found"]
    if reply.blocks == reply.asked_blocks:
        return lines
    lines.append(f"block {reply.blocks} is not: {REASONS.get(reply.reason, reply.reason)}")
    if reply.later_blocks:
        lines.append(f"{reply.later_blocks} later blocks are here all the same; nothing reaches them without it")
    if identity and not identity.adapter and not identity.salt:
        lines.append("this is the prompt without an adapter or salt; for a request that has one, add --adapter or --salt")
    asked = mine | ({"adapter": identity.adapter, "salt": identity.salt} if identity else {})
    for place in reply.elsewhere:
        lines += ["", f"{place.blocks} blocks ({place.tokens} tokens) are found in namespace {place.digest.hex()[:12]}, where"]
        lines += [f"  {name} is {_value(there)}, here it is {_value(asked.get(name, ''))}" for name, there in sorted(place.differs.items())]
    if not reply.elsewhere:
        lines.append("no other namespace has more of it")
    return lines


def _value(text: str) -> str:
    return f'"{shown(text)}"'
