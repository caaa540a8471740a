"""`kvstore bench multiturn`: conversations that go on after their KV has been pushed to the disk, with the store and without it.

Several conversations take turns. Each turn adds a question to the history and waits for an answer; the daemon's memory holds fewer
conversations than there are, so by a conversation's next turn its blocks are on the disk. Without the store the same turns are computed
from their first token, by transformers alone. The two take turns too, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvstore.clients.client import KVClient
from kvstore.config import format_bytes
from kvstore.errors import DeadlineExceeded, InternalFault, InvalidArgument
from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.engine import Engine, Options
from kvstore.worker.model import LoadedModel, load_model
from kvstore.worker.opening import open_shared
from kvstore.worker.plain import generate_plain
from kvstore.worker.requests import Request

NAME = "multiturn"
HELP = "\n".join(
    [
        "Conversations of growing history over a real daemon whose memory holds fewer of them than there are.",
        "",
        "Prints the time to the first token of each turn with the store and without it, and where the blocks were when the turn began.",
        "The text is the demo's; every conversation reads it from another place. Times nothing right while others run.",
    ]
)
DRAM_PART = 0.25  # blocks: of all that the conversations need in the end, so much fits memory beside the one whose turn it is
SPARE_BLOCKS = 16  # blocks more, reserved ahead
LEAST_DRAM_BYTES = 2 << 20  # bytes: one extent
LEAST_NVME_BYTES = 64 << 20  # bytes: room for a few extents
STORED_TIMEOUT_S = 60.0  # seconds for the disk to have what a turn made
FLUSH_S = 10.0  # seconds for commits to be answered
POLL_S = 0.02  # seconds between two looks at that
WARM_UP_TOKENS = 96  # of a text that no conversation has


@dataclass(frozen=True)
class Plan:
    """`turn_tokens` are added by each question, `answer_tokens` by each answer."""

    turns: int
    conversations: int
    turn_tokens: int
    answer_tokens: int

    @property
    def most_tokens(self) -> int:
        """Of a conversation at its end."""
        return self.turns * (self.turn_tokens + self.answer_tokens)


@dataclass(frozen=True)
class Turn:
    """One turn of one conversation. `nvme_blocks`: of the blocks that the store had for it, how many only the disk had."""

    conversation: int
    turn: int
    prompt_tokens: int
    store_s: float
    plain_s: float
    hit_tokens: int
    dram_blocks: int
    nvme_blocks: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--turns", metavar="N", type=int, default=10, help="of each conversation (default %(default)s)")
    parser.add_argument("--conversations", metavar="N", type=int, default=4, help="that take turns (default %(default)s)")
    parser.add_argument("--turn-tokens", metavar="N", type=int, default=384, help="that a question adds (default %(default)s)")
    parser.add_argument("--answer-tokens", metavar="N", type=int, default=16, help="that an answer has (default %(default)s)")
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="default: the bundled SmolLM2-135M-Instruct")
    parser.add_argument("--dir", metavar="DIR", type=Path, default=Path("."), help="where the disk tier lies: on a real disk")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write. Returns 0."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the daemon ends with it
    plan = Plan(args.turns, args.conversations, args.turn_tokens, args.answer_tokens)
    if min(asdict(plan).values()) < 1:
        raise InvalidArgument("every number must be above 0")
    loaded = load_model(args.model)
    if plan.most_tokens > loaded.max_tokens:
        raise InvalidArgument(f"{plan.most_tokens} tokens in the end, the model takes {loaded.max_tokens}; take fewer or shorter turns")
    text = loaded.encode(files("kvstore.cli").joinpath("demo_text.txt").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="kvstore-multiturn-", dir=args.dir) as directory:
        figures = measure(loaded, plan, questions(text, plan), Path(directory))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(show(figures))
    return 0


def questions(text: Sequence[int], plan: Plan) -> list[list[int]]:
    """The tokens of each conversation's questions in a row: a text begun at places as far apart as can be, and again from its start."""
    asked, apart = plan.turns * plan.turn_tokens, max(1, len(text) // plan.conversations)
    return [[text[(which * apart + at) % len(text)] for at in range(asked)] for which in range(plan.conversations)]


def measure(loaded: LoadedModel, plan: Plan, asked: Sequence[Sequence[int]], directory: Path) -> dict[str, Any]:
    """All turns and their medians. `asked`: see `questions`."""
    slot_bytes, size = loaded.geometry().slot_bytes, loaded.geometry().block_tokens
    one = -(-plan.most_tokens // size)
    needed = plan.conversations * one
    dram_bytes = max((int(needed * DRAM_PART) + one + SPARE_BLOCKS) * slot_bytes, LEAST_DRAM_BYTES)
    nvme_bytes = max(2 * needed * slot_bytes, LEAST_NVME_BYTES)
    with DaemonProcess(directory, dram=str(dram_bytes), nvme_bytes=str(nvme_bytes)) as daemon:
        bench = _Bench(loaded, plan, daemon)
        try:
            turns = [bench.turn(turn, which, asked[which]) for turn in range(plan.turns) for which in range(plan.conversations)]
        finally:
            bench.close()
    rows = [_row([each for each in turns if each.turn == turn]) for turn in range(plan.turns)]
    return {
        "plan": asdict(plan),
        "dram_bytes": dram_bytes,
        "needed_bytes": needed * slot_bytes,
        "by_turn": rows,
        "last_turn_ratio": rows[-1]["plain_s"] / rows[-1]["store_s"],
        "turns": [asdict(each) for each in turns],
    }


class _Bench:
    """The engine over the daemon, and the history of each conversation."""

    def __init__(self, loaded: LoadedModel, plan: Plan, daemon: DaemonProcess) -> None:
        self._loaded, self._plan = loaded, plan
        self._store = open_shared(loaded, daemon.address, "multiturn")
        self._engine = Engine(loaded, self._store, Options(keep_logits=False))
        self._client = KVClient(daemon.address, name="bench")
        self._namespace = self._client.open_namespace(loaded.identity, loaded.geometry())
        self._histories: list[list[int]] = [[] for _ in range(plan.conversations)]
        warm = list(range(3, 3 + WARM_UP_TOKENS))
        self._engine.generate([Request(warm, 2)])
        self._engine.generate([Request(warm, 2)])
        generate_plain(loaded, warm, 2)

    def turn(self, turn: int, which: int, asked: Sequence[int]) -> Turn:
        """One turn, with the store and without; the answer with the store goes into the history."""
        plan, history = self._plan, self._histories[which]
        history += asked[turn * plan.turn_tokens : (turn + 1) * plan.turn_tokens]
        found = self._client.lookup(self._namespace, tokens=history)
        done = self._engine.generate([Request(tuple(history), plan.answer_tokens, ignore_eos=True)])[0]
        if done.error is not None or done.store_fault:
            raise InternalFault(f"turn {turn + 1} failed: {done.error or done.store_fault}")
        self._wait_until_stored()
        plain = generate_plain(self._loaded, history, 1)
        hits = done.hit_tokens // self._loaded.geometry().block_tokens
        in_dram = min(hits, sum(tier == "dram" for tier in found.tiers[:hits]))
        told = Turn(which, turn, len(history), done.timings.ttft_s, plain.ttft_s, done.hit_tokens, in_dram, hits - in_dram)
        history += done.tokens
        return told

    def close(self) -> None:
        """End all."""
        self._engine.close()
        self._store.close()
        self._client.close()

    def _wait_until_stored(self) -> None:
        """Until nothing waits to be copied to the disk: people think longer between two turns than that takes."""
        self._store.flush(FLUSH_S)
        until = time.monotonic() + STORED_TIMEOUT_S
        while self._client.stats().waiting_writes:
            if time.monotonic() > until:
                raise DeadlineExceeded(f"the disk has not stored a turn's blocks within {STORED_TIMEOUT_S:.0f} s; is it busy?")
            time.sleep(POLL_S)


def _row(turns: Sequence[Turn]) -> dict[str, float]:
    """Medians over the conversations."""
    names = ("prompt_tokens", "plain_s", "store_s", "hit_tokens", "dram_blocks", "nvme_blocks")
    return {"turn": turns[0].turn + 1} | {name: statistics.median(getattr(each, name) for each in turns) for name in names}


def show(figures: dict[str, Any]) -> str:
    """The table."""
    needed, memory, many = format_bytes(figures["needed_bytes"]), format_bytes(figures["dram_bytes"]), figures["plan"]["conversations"]
    head = f"{many} conversations by turns; they need {needed} in the end, the daemon's memory has {memory}. Medians."
    names = f"{'turn':>4} {'tokens':>7} {'without, s':>11} {'with, s':>9} {'ratio':>7} {'hits, tokens':>13} {'from memory':>12} {'disk':>6}"
    rows = [
        f"{row['turn']:>4.0f} {row['prompt_tokens']:>7.0f} {row['plain_s']:>11.3f} {row['store_s']:>9.3f}"
        f" {row['plain_s'] / row['store_s']:>7.1f} {row['hit_tokens']:>13.0f} {row['dram_blocks']:>12.0f} {row['nvme_blocks']:>6.0f}"
        for row in figures["by_turn"]
    ]
    last = f"at the last turn the first token comes {figures['last_turn_ratio']:.1f} times as soon"
    return "\n".join([head, "", names, *rows, "", last])
