"""`kvstore worker`: serve a language model over HTTP."""

import argparse
from pathlib import Path

from kvstore import config
from kvstore.cli.api_key import api_key
from kvstore.errors import ConfigError, Unavailable

NAME = "worker"
HELP = """Serve a language model over HTTP as OpenAI does (/v1/completions, /v1/chat/completions), its KV cache being the store.

The model is SmolLM2-135M-Instruct unless --model names a folder that Hugging Face's save_pretrained wrote. It needs a daemon (kvstore
serve), or --standalone for memory of its own. Metrics are under /metrics, and /health says whether it takes requests. With
KVSTORE_API_KEY in the environment clients must send that key. SIGTERM stops it in order: answers under way become whole first.

  kvstore worker --http 127.0.0.1:8000
  curl http://127.0.0.1:8000/v1/completions -d '{"model": "SmolLM2-135M-Instruct", "prompt": "Once upon a time"}'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="the model's folder (default: the bundled SmolLM2-135M-Instruct)")
    parser.add_argument("--name", default="", help="the model's name for clients (default: the folder's)")
    parser.add_argument("--http", metavar="HOST:PORT", default="127.0.0.1:8000", help="where to serve (default %(default)s; port 0: any)")
    store = parser.add_mutually_exclusive_group()
    store.add_argument("--listen", "--address", metavar="SOCKET", help="the daemon's socket, or host:port (default: the usual socket)")
    store.add_argument("--standalone", metavar="BYTES", type=_bytes, default=0, help="use no daemon but so much memory: 2GiB")
    parser.add_argument(
        "--role", choices=("prefill", "decode", "both"), default="both",
        help="behind `kvstore front`: prefill answers once a prompt's blocks are in the store; decode and both serve as ever",
    )  # fmt: skip
    parser.add_argument(
        "--device", metavar="DEVICE", default="auto",
        help="cpu; cuda or cuda:1: a GPU, its KV cache the daemon's pool there (serve --hbm); auto (the default): that where it can be had",
    )  # fmt: skip
    parser.add_argument("--guarantee", metavar="BYTES", type=_bytes, default=0, help="of the daemon's memory, that no other client takes")
    parser.add_argument("--limit", metavar="BYTES", type=_bytes, default=0, help="the most of the daemon's memory that it holds")
    parser.add_argument("--tails", action="store_true", help="find prefixes to the token, not only to the block (docs/tails.md)")
    parser.add_argument("--max-waiting", metavar="N", type=_count, help="requests that may wait before others are told to come later")
    parser.add_argument("--running", metavar="N", type=_count, help="texts that are made at once, at most")
    parser.add_argument("--step-tokens", metavar="N", type=_count, help="tokens of one step: more is faster, and longer between tokens")
    parser.add_argument("--max-body", metavar="BYTES", type=_bytes, default=8 << 20, help="largest request (default 8MiB)")
    parser.add_argument("--drain-s", metavar="S", type=float, default=30.0, help="seconds for answers under way at the end (default 30)")


def run(args: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    key = api_key()
    if not args.standalone:
        _reach(args.listen)  # loading a model first, only to find nobody there, takes long
    try:
        from kvstore.worker.http import main
        from kvstore.worker.http.app import Settings
        from kvstore.worker.http.server import Ending
    except ModuleNotFoundError as error:
        raise ConfigError(f"the worker needs {error.name}; pip install 'kvstore[worker]'") from error
    given = {name: getattr(args, name) for name in ("max_waiting", "running", "step_tokens") if getattr(args, name) is not None}
    given |= {"guarantee_bytes": args.guarantee, "limit_bytes": args.limit, "device": args.device}
    plan = main.Plan(args.model, args.listen, args.standalone, tails=args.tails, flushing=args.role == "prefill", **given)
    settings = Settings(args.name, key, args.max_body)
    main.run(plan, args.http, settings, Ending(args.drain_s), lambda line: print(f"kvstore worker ready: {line}", flush=True))
    return 0


def _reach(address: str | None) -> None:
    from kvstore.clients.client import KVClient

    try:
        with KVClient(address) as client:
            client.stats()
    except Unavailable as error:
        raise Unavailable(f"{error}; start `kvstore serve`, or give --standalone 2GiB for memory of its own") from error


def _bytes(text: str) -> int:
    try:
        return config.parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)
