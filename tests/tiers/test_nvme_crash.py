"""`kill -9` at any moment: what was stored is there and right, and nothing else is."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest

from tests.tiers.disk import Disk, found, units_of

SLOTS = 25
WAIT_S = 30.0  # seconds: far beyond what a process needs to start

# Stores, deletes and stores again, and says what is stored before and after each step.
WRITER = """
import random, sys
from pathlib import Path
from tests.tiers.disk import Disk, slots, store, units_of
tier = Disk(Path(sys.argv[1])).filled(0)
for extent in range(5):
    tier.assign_extent(extent, 3)
chance = random.Random(int(sys.argv[2]))
there = {}
for step in range(100_000):
    slot = chance.randrange(25)
    if slot in there:
        print("deleting", there.pop(slot), slot, flush=True)
        tier.delete_records(slots(slot), quarantine=False)
        print("deleted", flush=True)
    else:
        number = chance.choice([n for n in range(60) if n not in there.values()])
        print("storing", number, slot, flush=True)
        store(tier, number, units_of(slot))
        there[slot] = number
        print("stored", flush=True)
"""


def played(lines: list[str]) -> tuple[dict[int, int], tuple[str, ...]]:
    """What is stored after these lines, number to units; and the step that was under way, if one was."""
    there: dict[int, int] = {}
    pending: tuple[str, ...] = ()
    for line in lines:
        words = tuple(line.split())
        if words == ("stored",):
            there[int(pending[1])] = units_of(int(pending[2]))
        elif words and words[0] == "deleting":
            there.pop(int(words[1]))
        pending = words if len(words) == 3 else ()
    return there, pending


@pytest.mark.parametrize("seed", range(5))
def test_killed_at_any_moment_the_disk_tells_the_truth(disk: Disk, seed: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(disk.directory), str(seed)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    time.sleep(random.Random(seed).uniform(0.01, 0.3))
    process.kill()
    lines += process.stdout.readlines()
    process.wait(WAIT_S)
    expected, pending = played([line for line in lines if line.endswith("\n")])
    left = found(disk.open())
    if pending:  # this one step may or may not have happened
        number, units = int(pending[1]), units_of(int(pending[2]))
        assert left.pop(number, units) == units
        expected.pop(number, None)
    assert left == expected
