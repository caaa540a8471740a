"""One daemon, a bystander, and attackers: what the siege did to the daemon, and to the bystander."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from kvstore.testing.fake_gpu_daemon import GpuDaemon
from tests.hostile.bystander import Bystander

ROOT = Path(__file__).resolve().parents[2]
BAD_WORDS = ("Traceback", "unexpected", "Unexpected", "please report", "rule of the cache", "quarantine")
LEFT_S = 8.0  # seconds for everything of the attackers to be gone
TRANSIENT = ("reserved", "filling", "doomed", "orphaned")
STEPS = 5  # parts that the messages are sent in, with a look at the daemon's memory after each


@dataclass
class Outcome:
    """`faults` must be empty."""

    messages: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    resident_bytes: list[int] = field(default_factory=list)  # the daemon's own memory after each step
    bystander_rounds: int = 0
    bystander_read_share: float = 0.0
    bystander_slowest_s: float = 0.0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def run(directory: Path, messages: int, seed: int, processes: int = 1) -> Outcome:
    """Send so many messages, and look."""
    outcome = Outcome()
    started_at = time.monotonic()
    with GpuDaemon(directory, hbm="8MiB", gpus=2, dram="32MiB", nvme_bytes="64MiB") as daemon:
        with Bystander(daemon.address) as bystander:
            for step in range(STEPS):
                _attack(daemon.address, messages // STEPS // processes, seed * 100 + step, processes, outcome)
                outcome.resident_bytes.append(resident_bytes(daemon.pid))
        outcome.bystander_rounds = bystander.rounds
        outcome.bystander_read_share = bystander.read_blocks / max(1, bystander.stored_blocks)
        outcome.bystander_slowest_s = bystander.slowest_s
        outcome.faults += bystander.faults
        outcome.faults += _left(daemon)
        outcome.faults += bad_lines(daemon.log())
    outcome.seconds = time.monotonic() - started_at
    return outcome


def bad_lines(log: str) -> list[str]:
    """What no input may make the daemon write, each with what follows it."""
    lines = log.splitlines()
    bad = [at for at, line in enumerate(lines) if any(word in line for word in BAD_WORDS)]
    return ["\n    ".join(lines[at : at + 25]) for at in bad[:5]]


def _attack(address: str, messages: int, seed: int, processes: int, outcome: Outcome) -> None:
    commands = [[sys.executable, "-m", "tests.hostile.attack", address, str(seed * 10 + one), str(messages)] for one in range(processes)]
    attackers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in commands]
    for attacker in attackers:
        text, _ = attacker.communicate()
        if attacker.returncode:
            outcome.faults.append(f"an attacker ended with status {attacker.returncode}")
            continue
        said = json.loads(text)
        outcome.messages += said["messages"]
        outcome.statuses.update(said["statuses"])
        outcome.faults += said["faults"]


def resident_bytes(pid: int) -> int:
    """A process's own memory, without what it shares: the arena is not in it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _left(daemon: DaemonProcess) -> list[str]:
    """What the attackers have left behind, and what does not add up."""
    with KVClient(daemon.address) as client:
        ends_at = time.monotonic() + LEFT_S
        while True:
            stats = client.stats()
            left = [f"{tier.tier} {name} {tier.class_bytes[name]}" for tier in stats.tiers for name in TRANSIENT if tier.class_bytes[name]]
            left += [f"{tier.tier} held {tier.held_bytes}" for tier in stats.tiers if tier.held_bytes]
            left += [f"session {each.session} of {each.client!r}" for each in stats.sessions if not each.client.startswith("(daemon")]
            if not left or time.monotonic() > ends_at:
                break
            time.sleep(0.05)
        time.sleep(2.5)  # an idle daemon checks its rules, one a look
        broken = client.stats().counters["rules_broken"]
    sums = [f"{tier.tier} classes" for tier in stats.tiers if sum(tier.class_bytes.values()) != tier.capacity_bytes]
    return [f"left: {what}" for what in left] + sums + ([f"{broken} rules broken"] if broken else [])
