"""`kvstore generate`: continue one prompt, out of the daemon's store where one runs."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.cli.text import utf8
from kvstore.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from kvstore.worker.branch import Completion

NAME = "generate"
HELP = """Continue a prompt with a language model, taking what the store already has of it.

The model is SmolLM2-135M-Instruct unless --model names a folder that Hugging Face's save_pretrained wrote. The prompt is taken as it
stands, without a chat template. Where no daemon answers, it runs on memory of its own and says so.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="a file that holds the prompt")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=64, help="tokens to make at most (default 64)")
    parser.add_argument(
        "--window", metavar="N", type=int, default=0, help="a stream without an end: the model sees the first tokens and the last N"
    )
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="the model's folder (default: the bundled SmolLM2-135M-Instruct)")
    store = parser.add_mutually_exclusive_group()
    store.add_argument("--address", "--listen", metavar="SOCKET", help="the daemon's socket, or host:port (default: the usual socket)")
    store.add_argument("--standalone", action="store_true", help="use no daemon")
    parser.add_argument("--json", action="store_true", help="print one JSON object with the text, its tokens, the hit and the timings")


def run(args: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    text = _prompt(args)
    try:
        from kvstore.worker import opening
        from kvstore.worker.engine import Engine
        from kvstore.worker.model import load_model
        from kvstore.worker.requests import Request
        from kvstore.worker.streams import store_tokens
    except ModuleNotFoundError as error:
        raise ConfigError(f"the worker needs {error.name}; pip install 'kvstore[worker]'") from error
    loaded = load_model(args.model)
    tokens = loaded.encode(text)
    total = min(len(tokens) + max(args.max_tokens, 0), loaded.max_tokens)
    if args.window:
        total = store_tokens(args.window, loaded.geometry().block_tokens)
    if args.standalone:
        opened = opening.Opened(opening.open_alone(loaded, total), shared=False)
    else:
        opened = opening.open_either(loaded, args.address, total)
    if opened.why_alone:
        print(f"kvstore: {opened.why_alone}; going on without the store", file=sys.stderr)
    engine = Engine(loaded, opened.store)
    try:
        done = engine.generate([Request(tokens, args.max_tokens, window=args.window)])[0]
    finally:
        engine.close()
        opened.store.close()
    if done.error is not None:
        raise done.error
    _show(done, loaded.decode(done.tokens), len(tokens), opened.shared, args.json)
    return 0


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt is not None:
        return utf8(args.prompt, "--prompt")
    try:
        if args.prompt_file is None:
            return utf8(sys.stdin.read(), "standard input")
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        place = "standard input" if args.prompt_file is None else f"prompt file {args.prompt_file}"
        raise InvalidArgument(f"{place}: {error}; give readable text in UTF-8") from error


def _show(done: "Completion", text: str, prompt_tokens: int, shared: bool, as_json: bool) -> None:
    if as_json:
        facts = {
            "text": text,
            "tokens": done.tokens,
            "finish": str(done.finish),
            "prompt_tokens": prompt_tokens,
            "hit_tokens": done.hit_tokens,
            "store": "daemon" if shared else "standalone",
            "store_fault": done.store_fault,
            "timings": asdict(done.timings),
        }
        print(json.dumps(facts))
        return
    print(text)
    if done.store_fault:
        print(f"kvstore: {done.store_fault}; the answer was made without the store", file=sys.stderr)
    first_ms = done.timings.ttft_s * 1000
    print(f"{done.hit_tokens} of {prompt_tokens} prompt tokens from the store, first token after {first_ms:.0f} ms", file=sys.stderr)
