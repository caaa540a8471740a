"""What the demo measures: one prompt, plain, cold, again in the same worker, in another one, and after the daemon was killed.

Each figure is the median over repeats that are alike: every repeat has a salt of its own, so that its cold run is cold, and its first
run in the other worker, and after the restart, is the first one there. Plain and cold runs alternate, so that both see the same machine.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvstore.cli.demo_processes import Daemon, Places, Worker, places
from kvstore.clients.client import KVClient
from kvstore.errors import DeadlineExceeded

PROMPT_TOKENS = 4000  # of the shipped text: a long prompt, half of what the model takes
ANSWER_TOKENS = 32  # made and compared in the first repeat; the others compare their first token's logits
REPEATS = 3  # runs of each kind: the fewest of which a median leaves out one that the machine disturbed
WARM_UP_TOKENS = 96  # of the end of the text, which no measured prompt reaches
STORED_TIMEOUT_S = 120.0  # for the disk to have every block: 92 MB take a second
POLL_S = 0.05  # seconds between two looks at how many blocks the disk has: it takes about one to write them
REACH_TIMEOUT_S = 60.0  # for a worker to be attached to the new daemon
COLD, WARM = "cold", ("same_worker", "other_worker", "after_restart")

Answer = dict[str, Any]


@dataclass
class Figures:
    """All answers, by kind of run; see `kvstore.worker.loop` for what an answer has. `splits`: storeless ones by their split point."""

    prompt_tokens: int
    answers: dict[str, list[Answer]] = field(default_factory=lambda: {name: [] for name in ("plain", COLD, *WARM)})
    splits: dict[int, Answer] = field(default_factory=dict)

    def ttft_ms(self, kind: str) -> float:
        """Median time to the first token."""
        return 1000 * statistics.median(float(answer["ttft_s"]) for answer in self.answers[kind])

    def hit_tokens(self, kind: str) -> int:
        """Prompt tokens from the store, in the worst repeat."""
        return int(min(answer["hit_tokens"] for answer in self.answers[kind]))

    def part_ms(self, kind: str, part: str) -> float:
        """Median of one of a run's timings."""
        return 1000 * statistics.median(float(answer["timings"][part]) for answer in self.answers[kind])

    def identical(self) -> bool:
        """Whether every run answered as transformers does without the store at the same split point, to the last bit."""
        plain = self.answers["plain"][0]
        cold = all(_agrees(answer, plain) for answer in [*self.answers[COLD], *self.answers["plain"]])
        return cold and all(_agrees(answer, self.splits[answer["hit_tokens"]]) for kind in WARM for answer in self.answers[kind])

    def as_json(self) -> dict[str, object]:
        """What `--json` writes."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "ttft_ms": {kind: round(self.ttft_ms(kind), 1) for kind in self.answers},
            "hit_tokens": {kind: self.hit_tokens(kind) for kind in WARM},
            "identical_output": self.identical(),
        }


def _agrees(answer: Answer, reference: Answer) -> bool:
    """Bits of the first token's logits, and all tokens that both made."""
    tokens = answer["tokens"]
    return bool(answer["first_logits"] == reference["first_logits"] and tokens == reference["tokens"][: len(tokens)] and tokens)


def demo_text() -> str:
    """The prose that the demo's prompt is made from; demo_text_origin.txt says where it comes from."""
    return files("kvstore.cli").joinpath("demo_text.txt").read_text(encoding="utf-8")


def measure(tell: Callable[[str], None]) -> Figures:
    """Run it all; `tell` hears what happens. Raises the store's errors where a part of it cannot work here."""
    with places() as where:
        tell("starting the daemon and two workers, which load the model; all of it takes some two minutes")
        with Daemon(where) as daemon, Worker(where, "first worker") as first, Worker(where, "second worker") as second:
            for worker in (first, second):
                worker.loaded()
            return _Demo(where, daemon, first, second, tell).run()


class _Demo:
    def __init__(self, where: Places, daemon: Daemon, first: Worker, second: Worker, tell: Callable[[str], None]) -> None:
        self._where, self._daemon, self._first, self._second, self._tell = where, daemon, first, second, tell
        text = first.ask("encode", text=demo_text())["tokens"]
        self._prompt: list[int] = text[:PROMPT_TOKENS]
        self._figures = Figures(len(self._prompt))
        for worker in (first, second):
            self._warm_up(worker, text[-WARM_UP_TOKENS:])

    def run(self) -> Figures:
        """All runs, in the order that tells the story."""
        for repeat in range(REPEATS):
            self._tell(f"the prompt of {len(self._prompt)} tokens without the store, then cold, then again ({repeat + 1} of {REPEATS})")
            self._plain(repeat)
            self._ask(self._first, COLD, repeat)
            self._wait_until_stored()
            self._ask(self._first, "same_worker", repeat)
        self._tell("the other worker, which has never seen it")
        for repeat in range(REPEATS):
            self._ask(self._second, "other_worker", repeat)
        self._wait_until_stored()
        self._tell("kill -9 the daemon, start it again on the same disk, and ask once more")
        self._daemon.kill_and_restart()
        self._second.ask("reach", timeout_s=REACH_TIMEOUT_S)
        for repeat in range(REPEATS):
            self._ask(self._second, "after_restart", repeat)
        self._tell("and without the store at the same split point, to compare")
        for split in {answer["hit_tokens"] for kind in WARM for answer in self._figures.answers[kind]}:
            self._figures.splits[split] = self._first.ask("plain", tokens=self._prompt, max_tokens=ANSWER_TOKENS, split=split)
        return self._figures

    def _plain(self, repeat: int) -> None:
        answer = self._first.ask("plain", tokens=self._prompt, max_tokens=_answer_tokens(repeat), split=0)
        self._figures.answers["plain"].append(answer)

    def _ask(self, worker: Worker, kind: str, repeat: int) -> None:
        answer = worker.ask("generate", tokens=self._prompt, max_tokens=_answer_tokens(repeat), salt=f"demo {repeat}")
        self._figures.answers[kind].append(answer)

    def _warm_up(self, worker: Worker, tokens: list[int]) -> None:
        """Let a worker load its code and touch its memory before anything is timed."""
        worker.ask("plain", tokens=tokens, max_tokens=2, split=0)
        for _ in range(2):
            worker.ask("generate", tokens=tokens, max_tokens=2, salt="warm up")

    def _wait_until_stored(self) -> None:
        """Until the disk has as many blocks as memory has."""
        until = time.monotonic() + STORED_TIMEOUT_S
        with KVClient(str(self._where.socket), name="demo") as client:
            while True:
                blocks = {tier.tier: tier.blocks for tier in client.stats().tiers}
                if blocks["nvme"] >= blocks["dram"]:
                    return
                if time.monotonic() > until:
                    raise DeadlineExceeded(f"the disk has {blocks['nvme']} of {blocks['dram']} blocks after {STORED_TIMEOUT_S:.0f} s")
                time.sleep(POLL_S)


def _answer_tokens(repeat: int) -> int:
    return ANSWER_TOKENS if repeat == 0 else 1


def write_json(figures: Figures, path: Path) -> None:
    """Write the figures to a file."""
    path.write_text(json.dumps(figures.as_json(), indent=2) + "\n", encoding="utf-8")
