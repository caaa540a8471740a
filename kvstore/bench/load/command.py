"""`kvstore bench load`: what there is to type, and the run from the trace to the tables."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvstore.bench.load.measure import ENGINES, OURS, Places, Work, checked, cores, measure, warm_up
from kvstore.bench.load.prompts import Load, Shape, make
from kvstore.bench.load.report import report, show
from kvstore.bench.replay_trace import BLOCK_TOKENS, EXCERPT, read_trace
from kvstore.config import format_bytes, parse_bytes
from kvstore.errors import InvalidArgument
from kvstore.geometry import Geometry
from kvstore.worker.scheduler import DEFAULT_RUNNING, DEFAULT_STEP_TOKENS

NAME = "load"
HELP = "\n".join(
    [
        "The worker's engine beside others on the same requests, in one run, one after another.",
        "",
        "Requests are conversations of a trace, with lengths scaled down to the model and real text, and come when they like (Poisson).",
        "Every engine has the same memory for its KV, tokens a step and cores, and is warmed up with strangers of the same lengths.",
        "",
        *(f"  {name:<22} {text}" for name, text in ENGINES.items()),
        "",
        "The exit status is 1 where this project's engine gave a wrong number of tokens, or held blocks or leases at the end.",
    ]
)
WARMING_PART = 8  # one in so many requests is served as a stranger first: kernels are built, memory is touched


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--requests", metavar="N", type=int, default=200, help="how many (default %(default)s)")
    parser.add_argument("--rate", metavar="R", type=float, default=4.0, help="requests a second on average (default %(default)s)")
    parser.add_argument("--scale", metavar="S", type=int, default=16, help="lengths are divided by it: a power of 2 (default %(default)s)")
    parser.add_argument("--trace", metavar="FILE", type=Path, default=EXCERPT, help="in Mooncake's format (default: the excerpt)")
    parser.add_argument("--memory", metavar="SIZE", type=parse_bytes, default=2 << 30, help="of each engine for KV (default 2GiB)")
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="default: the bundled SmolLM2-135M-Instruct")
    parser.add_argument("--step-tokens", metavar="N", type=int, default=DEFAULT_STEP_TOKENS, help="of one step (default %(default)s)")
    parser.add_argument("--running", metavar="N", type=int, default=DEFAULT_RUNNING, help="requests at once (default %(default)s)")
    parser.add_argument("--seed", metavar="N", type=int, default=1, help="of the arrivals (default %(default)s)")
    parser.add_argument("--only", metavar="ENGINE,...", default="", help="default: all")
    parser.add_argument("--venvs", metavar="DIR", type=Path, default=Path("."), help="where .venv-vllm lies (default: here)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns 0, or 1 where this project's engine did not do all that it was asked, or kept something."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the engines end with it
    names = checked(args.only)
    model = model_folder(args.model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    shape = Shape(args.requests, args.rate, args.scale, int(config["max_position_embeddings"]), args.seed)
    load = _load(args.trace, shape, model)
    token_bytes = Geometry.from_hf_config(config, "bfloat16", 1).bytes_per_token
    work = Work(
        str(model), shape.positions, token_bytes, args.memory, args.step_tokens, args.running, len(load.asked), cores()
    )  # fmt: skip
    print(describe(load, shape, args), flush=True)
    with tempfile.TemporaryDirectory(prefix="kvstore-load-") as directory:
        places = Places(args.venvs, Path(directory), lambda line: print(f"… {line}", file=sys.stderr, flush=True))
        results = measure(names, work, load.asked, warm_up(load.asked[::WARMING_PART]), places)
    found: dict[str, Any] = report(results, load.asked)
    found |= {"work": vars(work), "shape": vars(shape), "cut": load.cut, "shared_tokens": load.shared_tokens}
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(show(found))
    return 1 if any(result.reason for result in results if result.name.startswith(OURS)) else 0


def describe(load: Load, shape: Shape, args: argparse.Namespace) -> str:
    """What is asked, and how it came about."""
    share, size = load.shared_tokens / load.prompt_tokens, BLOCK_TOKENS // shape.scale
    return f"""{len(load.asked)} requests of whole conversations from {args.trace.name}, {shape.rate:g} a second on average (Poisson).
Lengths are the trace's divided by {shape.scale} and rounded up, so that prompt and answer fit {shape.positions} positions
({load.cut} prompts are cut): a block of the trace is {size} tokens.
{load.prompt_tokens} prompt tokens, {load.shared_tokens} of them ({share:.0%}) in blocks that an earlier prompt had.
{load.answer_tokens} tokens to make. Each engine has {format_bytes(args.memory)} for KV and {cores()} cores, and computes
{args.step_tokens} tokens a step of {args.running} requests, in bfloat16.
"""


def _load(trace: Path, shape: Shape, model: Path) -> Load:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)

    def encode(text: str) -> list[int]:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]

    text = files("kvstore.cli").joinpath("demo_text.txt").read_text(encoding="utf-8")
    return make(read_trace(trace), shape, encode, text)


def model_folder(folder: Path | None) -> Path:
    """Where the model lies: `folder`, or the bundled one. Raises InvalidArgument where there is none."""
    from kvstore.worker.bundled import bundled_folder

    model = bundled_folder() if folder is None else folder
    if not (model / "config.json").is_file():
        raise InvalidArgument(f"model {model}: no config.json there; give a folder that Hugging Face's save_pretrained wrote")
    return model.absolute()
