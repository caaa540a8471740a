"""The daemon and its clients keep every promise on a machine where everything goes wrong; each seed is one run of it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.simulation.__main__ import failed
from tests.simulation.mutants import MUTANTS, Mutant, mutated
from tests.simulation.scene import play

SEEDS = int(os.environ.get("KVSTORE_SIMULATION_SEEDS", "200"))  # runs; each some 0.2 s of one processor
RECORDED = 3  # seeds of which every step is compared

HERE = Path(__file__).resolve().parent.parent.parent
DIGEST = """
import hashlib
from tests.simulation.scene import play
for seed in range({count}):
    print(hashlib.sha256("\\n".join(play(seed, record=True).story).encode()).hexdigest())
"""

# What must have happened in 200 runs, or they show less than they seem to.
REACHED = (
    "committed", "demoted", "promoted", "evicted_dram", "evicted_nvme", "recovered", "corrupt_blocks", "unreadable_blocks", "failed_writes",
    "failed_deletes", "acquire_deadlines", "no_room", "cleared", "sessions_lost", "extents_reassigned", "dropped_before_written",
    "kill_daemon", "stop_daemon", "end_daemon", "lose_power", "kill_client", "stop_client", "cut_client", "jump_clock",
    "resumed", "survivors", "claimed", "late_writes", "tail_hits",
    "committed_in_pool", "served_from_pool", "brought_up", "audited_in_pools", "demoted_from_hbm", "failed_from_hbm", "dropped_from_hbm",
    "evicted_hbm", "copies_refused", "copies_slow", "lose_gpu",
)  # fmt: skip


@pytest.mark.timeout(600)
def test_no_promise_is_broken_on_any_seed() -> None:
    total: Counter[str] = Counter()
    broken = []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for report in pool.map(play, range(SEEDS), chunksize=5):
            total += report.reached
            broken += [failed(report)] if report.failure else []
    assert not broken, "\n".join(broken)
    assert [name for name in REACHED if not total[name]] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_that_the_simulation_must_notice_can_still_be_made(mutant: Mutant) -> None:
    """Noticing them takes minutes: `make mutants`."""
    text = (HERE / mutant.path).read_text(encoding="utf-8")
    assert mutated(mutant, text) != text


def test_a_seed_replays_exactly_in_another_process() -> None:
    here = [hashlib.sha256("\n".join(play(seed, record=True).story).encode()).hexdigest() for seed in range(RECORDED)]
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(HERE)}
        command = [sys.executable, "-c", DIGEST.format(count=RECORDED)]
        there = subprocess.run(command, env=environment, cwd=HERE, check=True, capture_output=True, text=True, timeout=120).stdout
        assert there.split() == here
