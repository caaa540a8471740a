"""Shows that the simulation notices: one line of the product is changed, in a copy of the tree, and some seed must fail.

    python -m tests.simulation.mutants [--seeds 300] [--only NAME] [--write docs/guarantees.md]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent.parent
TREE = ("kvstore", "tiers", "clients", "kernels", "proto", "tests/__init__.py", "tests/simulation")  # what a run imports
TIMEOUT_S = 900.0  # seconds: many times what all seeds take
BEGIN, END = "<!-- mutants: written by tests/simulation/mutants.py -->", "<!-- end of mutants -->"


@dataclass(frozen=True)
class Mutant:
    """A fault that somebody could make: `old`, which is in the file once, becomes `new`."""

    name: str
    path: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "a tail is one token too long",
        "kvstore/cache/tails.py",
        "    return rows[best], int(same[best])",
        "    return rows[best], int(same[best]) + 1",
    ),
    Mutant(
        "token ids stay when their block has gone",
        "kvstore/cache/index.py",
        "            self.tokens.forget(row)",
        "            pass",
    ),
    Mutant(
        "a checksum is not compared",
        "kvstore/daemon/copier.py",
        "        if found == read.checksum:",
        "        if found:",
    ),
    Mutant(
        "a waiter is granted a block that was not verified",
        "kvstore/cache/completions.py",
        "    if row and report.result is TransferResult.OK:",
        "    if row and report.result is not TransferResult.FAILED:",
    ),
    Mutant(
        "a lease is not counted",
        "kvstore/cache/state.py",
        "        self.dram.hold_many(slots, 1)",
        "        pass",
    ),
    Mutant(
        "a leased slot is freed when its block is removed",
        "kvstore/cache/leaving.py",
        "    elif table.is_held(slot):",
        "    elif table.transfers_at[slot]:",
    ),
    Mutant(
        "a slot is freed before its record is deleted",
        "kvstore/cache/state.py",
        "            else:\n                self.delete_record(slot)",
        "            else:\n                table.become(slot, SlotState.FREE)",
    ),
    Mutant(
        "a deletion that failed counts as done",
        "kvstore/cache/completions.py",
        "    nvme = state.tables[Tier.NVME]\n    if report.result is not TransferResult.OK:",
        "    nvme = state.tables[Tier.NVME]\n    if report.result is TransferResult.CORRUPT:",
    ),
    Mutant(
        "a slot changes hands without a new generation",
        "kvstore/cache/slots.py",
        "self.generation[slots] % np.uint32(0xFFFFFFFF) + np.uint32(1)",
        "np.maximum(self.generation[slots], np.uint32(1))",
    ),
    Mutant(
        "a slot is marked after it was granted",
        "kvstore/daemon/hub.py",
        "                self._mark(decision)",
        "                self._loop.call_later(0.001, self._mark, decision)",
    ),
    Mutant(
        "a block that waits to be written is forgotten",
        "kvstore/cache/slotqueue.py",
        "            if flags[slot] & self._waits:\n                return slot",
        "            if flags[slot] & self._waits and slot % 5:\n                return slot",
    ),
    Mutant(
        "an orphan is freed when its session ends",
        "kvstore/daemon/hub.py",
        "        self.cache.session_lost(session, reason)",
        "        self.cache.session_lost(session, reason), self.cache.process_gone(session)",
    ),
    Mutant(
        "a record is written though its block's bytes were not",
        "kvstore/daemon/copier.py",
        "        written = [write for write in writes if results[write.transfer].result is TransferResult.OK]",
        "        written = sound",
    ),
    Mutant(
        "a record is on the medium before its block's bytes are",
        "tiers/nvme.py",
        "            if self._durable is Durable.POWER:\n                self._sync_data(",
        "            if self._durable is Durable.PROCESS:\n                self._sync_data(",
    ),
    Mutant(
        "a block is reported stored before its record is on the medium",
        "tiers/nvme.py",
        "            self._records.sync()\n            if self._records.failed_syncs",
        "            if self._records.failed_syncs",
    ),
    Mutant(
        "what survivors of the last daemon hold is given to others",
        "kvstore/daemon/startup.py",
        "survivors(np.unique(np.concatenate(units)),",
        "survivors(np.unique(np.concatenate(units))[:0],",
    ),
    Mutant(
        "a transfer does not keep its slot",
        "kvstore/cache/slots.py",
        "            return self.holds_at[slot] > 0 or self.transfers_at[slot] > 0",
        "            return self.holds_at[slot] > 0",
    ),
    Mutant(
        "a second commit of a key replaces the first",
        "kvstore/cache/writing.py",
        "    if row and index.stored(row):\n        if named:",
        "    if row and index.stored(row) and named:\n        if named:",
    ),
    Mutant(
        "a transfer of a block that was removed meanwhile goes on as if it were there",
        "kvstore/cache/leaving.py",
        "            transfer.row = 0\n",
        "            state.writing.setdefault(row, transfer)\n",
    ),
    Mutant(
        "a session's limit is not looked at",
        "kvstore/cache/leases.py",
        "    if session.limit_bytes and session.held_bytes + own > session.limit_bytes:",
        "    if session.limit_bytes and session.held_bytes > session.limit_bytes:",
    ),
    Mutant(
        "an orphan in GPU memory is freed when its session ends",
        "kvstore/daemon/pools.py",
        "            pool.cache.session_lost(session, reason)",
        "            pool.cache.session_lost(session, reason), pool.cache.process_gone(session)",
    ),
    Mutant(
        "a block that was cleared on its way down is made visible",
        "kvstore/daemon/demoter.py",
        "            elif units == block.units:",
        "            elif block.units:",
    ),
    Mutant(
        "a copy down that failed counts as made",
        "kvstore/daemon/demotion.py",
        "            return [_FAILED] * len(run)",
        "            pass",
    ),
    Mutant(
        "blocks that come down together all have the first one's checksum",
        "kvstore/daemon/demotion.py",
        "block_checksum(facts.digest, block.hash, view)",
        "block_checksum(facts.digest, run[0].hash, view)",
    ),
    Mutant(
        "host memory is asked for the prompt's first blocks, not for those after the GPU's",
        "clients/reading.py",
        "            hashes = hashes[HASH_BYTES * len(above) :]",
        "            hashes = hashes[: len(hashes) - HASH_BYTES * len(above)]",
    ),
    Mutant(
        "a hole before the window is read as slot 0",
        "clients/lease.py",
        "        if not self._generations[which]:",
        "        if self._units[which] < 0:",
    ),
)


def main() -> int:
    """The exit status: 1 where a mutant lives."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=400, help="seeds that a mutant may survive before it counts as not caught")
    parser.add_argument("--only", default="", help="the mutants with this in their name")
    parser.add_argument("--write", type=Path, help="the document whose table is to be replaced")
    args = parser.parse_args()
    if found := run(None, args.seeds):
        print(f"the product itself fails: {found}")
        return 1
    rows = []
    lives = 0
    for mutant in MUTANTS:
        if args.only in mutant.name:
            caught = run(mutant, args.seeds)
            lives += not caught
            rows.append(f"| {mutant.name} | `{mutant.path}` | {caught or 'not caught'} |")
            print(rows[-1], flush=True)
    if args.write:
        write(args.write, rows)
    print(f"{len(rows)} mutants, {lives} not caught in {args.seeds} seeds")
    return 1 if lives else 0


def run(mutant: Mutant | None, seeds: int) -> str:
    """By which seed and check it was caught; empty where it was not. None: the product as it is."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        tree = Path(directory)
        copy(tree)
        if mutant is not None:
            path = tree / mutant.path
            path.write_text(mutated(mutant, path.read_text(encoding="utf-8")), encoding="utf-8")
        command = [sys.executable, "-m", "tests.simulation", "0", "--count", str(seeds), "--first"]
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return "a run that does not end"
    found = re.search(r"^seed (\d+) failed: (.*)$", done.stdout, re.MULTILINE)
    if found:
        return f"seed {found[1]}: {shortened(found[2])}"
    if done.returncode:
        return f"an exception: {done.stderr.strip().splitlines()[-1][:100]}"
    return ""


def mutated(mutant: Mutant, text: str) -> str:
    """The file with its fault. Raises ValueError where the line is no longer there, once."""
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.path}: {text.count(mutant.old)} times {mutant.old!r}; choose the line of {mutant.name!r} anew")
    return text.replace(mutant.old, mutant.new)


def copy(tree: Path) -> None:
    """What a run imports, links as links."""
    for name in TREE:
        source, target = HERE / name, tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)


def shortened(text: str) -> str:
    """A check's sentence, without what differs from run to run."""
    first = text.split("; ")[0]
    return re.sub(r"\b[0-9a-f]{12}\b", "…", first)[:110]


def write(document: Path, rows: list[str]) -> None:
    """Replace the table between the document's marks."""
    text = document.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    table = "\n".join(["| a fault in the product | where | caught by |", "|---|---|---|", *rows])
    document.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
