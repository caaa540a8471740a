"""`kvstore bench disagg`: what there is to type, and the run from the load to the table."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.disagg.asking import Asked, Heard, send
from kvstore.bench.disagg.fleet import SETUPS, Fleet, Machine
from kvstore.bench.disagg.report import compare, show
from kvstore.bench.load.command import model_folder
from kvstore.bench.load.measure import cores
from kvstore.bench.load.prompts import Passages
from kvstore.errors import InternalFault, InvalidArgument
from kvstore.worker.scheduler import DEFAULT_STEP_TOKENS

NAME = "disagg"
HELP = "\n".join(
    [
        "Split roles beside workers that do both, behind one front door each, under the same requests.",
        "",
        "Texts are being made (`talk`: a short prompt, a long answer) while long prompts come in (`read`: a long prompt, a short answer).",
        "  split   kvstore worker --role prefill, kvstore worker --role decode",
        "  both    two kvstore workers of role both: as many processes, each with as many threads",
        "Both setups have a daemon of their own and are warmed up. Prints the time to the first token and between tokens, by kind.",
    ]
)
WARMING = 1_000_000  # passages: their numbers from here on are of strangers to the load, which has fewer


@dataclass(frozen=True)
class Plan:
    """The load. `talk_every_s`, `read_every_s`: mean seconds between two arrivals of a kind (Poisson)."""

    talks: int
    reads: int
    talk_tokens: int
    read_tokens: int
    talk_answer: int
    read_answer: int
    talk_every_s: float
    read_every_s: float
    seed: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--talks", metavar="N", type=int, default=12, help="texts with a long answer (default %(default)s)")
    parser.add_argument("--reads", metavar="N", type=int, default=8, help="long prompts (default %(default)s)")
    parser.add_argument("--talk-tokens", metavar="N", type=int, default=48, help="prompt of a talk (default %(default)s)")
    parser.add_argument("--read-tokens", metavar="N", type=int, default=1024, help="prompt of a read (default %(default)s)")
    parser.add_argument("--talk-answer", metavar="N", type=int, default=96, help="tokens that a talk makes (default %(default)s)")
    parser.add_argument("--read-answer", metavar="N", type=int, default=16, help="tokens that a read makes (default %(default)s)")
    parser.add_argument("--talk-every", metavar="S", type=float, default=1.5, help="mean seconds between talks (default %(default)s)")
    parser.add_argument("--read-every", metavar="S", type=float, default=2.5, help="mean seconds between reads (default %(default)s)")
    parser.add_argument("--seed", metavar="N", type=int, default=1, help="of the arrivals (default %(default)s)")
    parser.add_argument("--step-tokens", metavar="N", type=int, default=DEFAULT_STEP_TOKENS, help="of one step (default %(default)s)")
    parser.add_argument("--dram", metavar="SIZE", default="1GiB", help="of each daemon (default %(default)s)")
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="default: the bundled SmolLM2-135M-Instruct")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the processes end with it
    plan = Plan(
        args.talks, args.reads, args.talk_tokens, args.read_tokens, args.talk_answer, args.read_answer, args.talk_every, args.read_every,
        args.seed,
    )  # fmt: skip
    if min(plan.talks, plan.reads, plan.talk_tokens, plan.read_tokens, plan.talk_answer, plan.read_answer) < 1:
        raise InvalidArgument("every number of requests and tokens must be above 0")
    if min(plan.talk_every_s, plan.read_every_s) <= 0:
        raise InvalidArgument("--talk-every and --read-every must be above 0")
    folder = model_folder(args.model)
    machine = Machine(folder, max(1, cores() // len(SETUPS["split"])), args.dram, args.step_tokens)
    found = measure(plan, machine, _encoder(folder))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{plan.talks} talks of {plan.talk_tokens} + {plan.talk_answer} tokens and {plan.reads} reads of {plan.read_tokens} +", end=" ")
    print(f"{plan.read_answer}; two workers with {machine.threads} threads each, bfloat16 or the model's own type\n")
    print(show(found))
    return 0


def measure(plan: Plan, machine: Machine, encode: Callable[[str], list[int]]) -> dict[str, Any]:
    """Both setups, one after another, and how they compare."""
    heard: dict[str, list[Heard]] = {}
    for setup in SETUPS:
        print(f"… {setup}: workers of role {' and '.join(SETUPS[setup])}", file=sys.stderr, flush=True)
        heard[setup] = serve(setup, plan, machine, encode)
    return {"plan": asdict(plan), "threads": machine.threads, "step_tokens": machine.step_tokens, **compare(heard)}


def serve(setup: str, plan: Plan, machine: Machine, encode: Callable[[str], list[int]]) -> list[Heard]:
    """What one setup answers, after a warm-up. Raises InternalFault where an answer is not whole."""
    strangers = [replace(each, at_s=0.0) for each in make(replace(plan, talks=2, reads=2), encode, WARMING)]
    model = machine.model.resolve().name
    with tempfile.TemporaryDirectory(prefix="kvstore-disagg-") as directory, Fleet(setup, machine, Path(directory)) as fleet:
        send(fleet.url, model, strangers)
        heard = send(fleet.url, model, make(plan, encode))
    if short := [each for each in heard if each.made_tokens != each.asked.answer_tokens]:
        raise InternalFault(f"{setup}: {len(short)} answers are not whole; report this")
    return heard


def make(plan: Plan, encode: Callable[[str], list[int]], first: int = 0) -> list[Asked]:
    """The load, by arrival: prompts of real text, no two of which begin alike. `first`: the number of its first passage."""
    text = files("kvstore.cli").joinpath("demo_text.txt").read_text(encoding="utf-8")
    generator = np.random.default_rng(plan.seed)
    load: list[Asked] = []
    for kind, count, tokens, answer, every_s in (
        ("talk", plan.talks, plan.talk_tokens, plan.talk_answer, plan.talk_every_s),
        ("read", plan.reads, plan.read_tokens, plan.read_answer, plan.read_every_s),
    ):
        passages = Passages(encode, text, tokens)
        arrivals_s = np.cumsum(generator.exponential(every_s, count)).tolist()
        load += [Asked(kind, at_s, passages.block(first + len(load) + at), answer) for at, at_s in enumerate(arrivals_s)]
    return sorted(load, key=lambda each: each.at_s)


def _encoder(folder: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return lambda text: [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]
