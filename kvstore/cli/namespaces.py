"""`kvstore namespaces`: what is stored, model by model."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from kvstore.cli.address import add_address_argument
from kvstore.cli.text import shown
from kvstore.config import format_bytes

if TYPE_CHECKING:
    from kvstore.proto import kvstore_pb2 as pb

NAME = "namespaces"
HELP = """What is stored, by namespace: each model, dtype, layout and shard has one of its own.

The digest, or the beginning of it, names a namespace for `kvstore lookup`, `explain` and `clear`; --json shows every fact that it is of."""
DIGITS = 12  # hexadecimal digits of a digest: two never begin alike, and they can be typed
FORMAT_CHARS = 24  # characters of an engine's layout: it begins with the engine
REVISION_CHARS = 16  # characters of a revision: of a commit or "sha256:" and a digest as many as tell it from another
MODEL_CHARS = 40  # characters of a model's name: the end of a path says which it is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where the daemon is and how to print."""
    add_address_argument(parser)
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
    rows = [["namespace", "dtype", "block", "format", "shard", *tiers, "revision", "model"]]
    for each in found:
        facts = {name: shown(value) for name, value in each.facts.items()}
        shard = "/".join(filter(None, (facts["shard"], facts["group"])))
        sizes = [format_bytes(each.blocks.get(tier, 0) * each.slot_bytes) for tier in tiers]
        model, wide = facts["model"], MODEL_CHARS
        names = [_begins(facts["format"], FORMAT_CHARS), _begins(shard, FORMAT_CHARS)]
        last = [_begins(facts["revision"], REVISION_CHARS), model if len(model) <= wide else f"…{model[-wide:]}"]
        rows.append([each.digest.hex()[:DIGITS], facts["kv_dtype"], facts["block_tokens"], *names, *sizes, *last])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(_padded(row, widths, {2, *range(5, 5 + len(tiers))})).rstrip() for row in rows]


def _padded(row: list[str], widths: list[int], numbers: set[int]) -> list[str]:
    """The cells, each as wide as its column; those of numbers end alike."""
    cells = enumerate(zip(row, widths, strict=True))
    return [cell.rjust(width) if column in numbers else (cell or "-").ljust(width) for column, (cell, width) in cells]


def _begins(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
