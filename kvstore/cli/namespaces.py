"""`kvstore namespaces`: what is stored, model by model."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from kvstore.cli.text import shown
from kvstore.config import format_bytes

if TYPE_CHECKING:
    from kvstore.proto import kvstore_pb2 as pb

NAME = "namespaces"
HELP = """What is stored, by namespace: each model, dtype, layout and shard has one of its own.

The digest, or the beginning of it, names a namespace for `kvstore lookup`, `explain` and `clear`; --json shows every fact that it is of."""
DIGITS = 12  # hexadecimal digits of a digest: two never begin alike, and they can be typed
MODEL_CHARS = 40  # characters of a model's name: the end of a path says which it is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where the daemon is and how to print."""
    parser.add_argument("--address", metavar="SOCKET", help="the daemon's socket, or host:port (default: the daemon's own default)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Ask and print; returns the exit status."""
    from kvstore.clients.client import KVClient

    with KVClient(args.address) as client:
        found = list(client.namespaces().namespaces)
    if args.json:
        print(json.dumps([_facts(each) for each in found], indent=2))
    elif found:
        print("\n".join(_table(found)))
    else:
        print("no namespace: no client has opened one, and the disk has none")
    return 0


def _facts(each: pb.NamespaceStats) -> dict[str, object]:
    keep = {"kind": each.keep.kind, "window_tokens": each.keep.window_tokens}
    blocks = dict(each.blocks)
    stored = {"slot_bytes": each.slot_bytes, "blocks": blocks, "bytes": {tier: count * each.slot_bytes for tier, count in blocks.items()}}
    return {"digest": each.digest.hex(), "facts": dict(sorted(each.facts.items())), "keep": keep, "tails": each.tails, **stored}


def _table(found: list[pb.NamespaceStats]) -> list[str]:
    tiers = sorted({tier for each in found for tier in each.blocks}) or ["dram"]
    head = f"{'namespace':<{DIGITS}}  {'dtype':<10}{'block':>6}  {'format':<12}{'shard':<9}"
    lines = [head + "".join(f"{tier:>12}" for tier in tiers) + "  model"]
    for each in found:
        facts = {name: shown(value) for name, value in each.facts.items()}
        shard = "/".join(filter(None, (facts["shard"], facts["group"]))) or "-"
        line = f"{each.digest.hex()[:DIGITS]}  {facts['kv_dtype']:<10}{facts['block_tokens']:>6}  {facts['format']:<12}{shard:<9}"
        sizes = "".join(f"{format_bytes(each.blocks.get(tier, 0) * each.slot_bytes):>12}" for tier in tiers)
        model = facts["model"] if len(facts["model"]) <= MODEL_CHARS else f"…{facts['model'][-MODEL_CHARS:]}"
        lines.append(f"{line}{sizes}  {model or '-'}")
    return lines
