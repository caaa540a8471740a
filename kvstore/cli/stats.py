"""`kvstore stats`: what a running daemon holds and does."""

import argparse
import json
from typing import Any

from kvstore.cli.address import add_address_argument
from kvstore.cli.text import shown
from kvstore.config import format_bytes

NAME = "stats"
HELP = """What the daemon holds and does: tiers, sessions, counters."""
CLASSES = ("live", "reserved", "filling", "doomed", "orphaned", "quarantined", "free", "unassigned")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where the daemon is and how to print."""
    add_address_argument(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    """Ask and print; returns the exit status."""
    from google.protobuf.json_format import MessageToDict

    from kvstore.clients.client import KVClient

    with KVClient(args.address) as client:
        reply = client.stats()
    facts = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    print(json.dumps(_numbers(facts), indent=2) if args.json else "\n".join(_table(_numbers(facts))))
    return 0


def _numbers(value: Any) -> Any:
    """Protobuf's JSON writes 64-bit numbers as text; here they are numbers again. Only values that are all digits are."""
    if isinstance(value, dict):
        return {key: inner if key in ("client", "epoch", "tenant", "version") else _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return int(value) if isinstance(value, str) and value.isdigit() else value


def _table(facts: dict[str, Any]) -> list[str]:
    lines = [f"kvstore {facts['version']}, up {facts['uptime_s']:.0f} s, epoch {facts['epoch']}", ""]
    lines.append(f"{'tier':<8}{'capacity':>12}{'blocks':>10}{'stored':>12}{'held':>12}  health")
    for tier in facts["tiers"]:
        health = tier["health"] + (f": {shown(tier['health_reason'])}" if tier["health_reason"] else "")
        sizes = (tier["capacity_bytes"], tier["class_bytes"].get("live", 0), tier["held_bytes"])
        capacity, stored, held = (f"{format_bytes(size):>12}" for size in sizes)
        lines.append(f"{tier['tier']:<8}{capacity}{tier['blocks']:>10}{stored}{held}  {health}")
    lines += ["", f"{'class':<14}" + "".join(f"{tier['tier']:>12}" for tier in facts["tiers"])]
    for name in CLASSES:
        lines.append(f"{name:<14}" + "".join(f"{format_bytes(tier['class_bytes'].get(name, 0)):>12}" for tier in facts["tiers"]))
    lines += ["", f"index  {facts['index_used_blocks']} of {facts['index_capacity_blocks']} rows"]
    if facts["tail_capacity_bytes"]:
        lines.append(f"tails  token ids of {facts['tail_blocks']} blocks, {format_bytes(facts['tail_bytes'])}")
    lines.append(f"disk   {facts['waiting_writes']} blocks wait to be written")
    passes = facts["scrub_passes"]
    lines += [f"scrub  {passes} passes, the last took {facts['scrub_pass_s']:.1f} s" if passes else "scrub  no pass has ended", ""]
    on_gpus = any(tier["tier"].startswith("hbm:") for tier in facts["tiers"])
    lines.append(f"{'session':<9}{'held':>12}{'leases':>8}{'reserved':>10}{'on GPUs':>12}"[: 51 if on_gpus else 39] + "  client")
    for session in facts["sessions"]:
        state = " (ended)" if session["ended"] else ""
        held = format_bytes(session["held_bytes"])
        on_gpu = f"{format_bytes(session['hbm_held_bytes']):>12}" if on_gpus else ""
        figures = f"{session['session']:<9}{held:>12}{session['leases']:>8}{session['reserved_slots']:>10}{on_gpu}"
        lines.append(f"{figures}  {shown(session['client'])}{state}")
    lines += ["", *(f"{name:<28}{number:>12}" for name, number in sorted(facts["counters"].items()))]
    return lines
