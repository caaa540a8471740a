"""`kvstore front`: one door before several workers."""

import argparse
import logging

from kvstore.cli.urls import server_url
from kvstore.errors import ConfigError, InvalidArgument

NAME = "front"
HELP = """Serve OpenAI's HTTP interface before several workers: prompts are computed by some, texts made by others.

A prompt goes to a prefill worker first, and once its blocks are in the store the request goes to a decode worker, which finds them there:
long prompts then hold up no text. The workers share one daemon. Without prefill workers it spreads requests over the others. /health
says how each worker is, metrics are under /metrics.

  kvstore worker --role prefill --http 127.0.0.1:8001 &
  kvstore worker --role decode --http 127.0.0.1:8002 &
  kvstore front --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--http", metavar="HOST:PORT", default="127.0.0.1:8080", help="where to serve (default %(default)s; port 0: any)")
    for role in ("prefill", "decode", "both"):
        parser.add_argument(f"--{role}", metavar="URL", action="append", default=[], help=f"a worker of role {role}; any number of times")
    parser.add_argument("--prefill-s", metavar="S", type=float, default=120.0, help="the longest wait for a prompt (default %(default)s)")
    parser.add_argument("--first-s", metavar="S", type=float, default=600.0, help="... for an answer's beginning (default %(default)s)")
    parser.add_argument("--between-s", metavar="S", type=float, default=120.0, help="... between two of its pieces (default %(default)s)")
    parser.add_argument(
        "--prefill-from", metavar="BYTES", type=int, default=512, help="shorter prompts go to a decode worker at once (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Do it; returns the exit status."""
    try:
        from kvstore.front.relay import Limits
        from kvstore.front.server import serve
        from kvstore.front.workers import Role, Worker
    except ModuleNotFoundError as error:
        raise ConfigError(f"the front door needs {error.name}; pip install 'kvstore[worker]'") from error
    workers = [Worker(_worker_url(url), role) for role in Role for url in getattr(args, role)]
    if not workers:
        raise ConfigError("a front door needs workers; name them with --prefill, --decode and --both URL")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    limits = Limits(args.prefill_s, args.first_s, args.between_s, args.prefill_from)
    serve(args.http, workers, limits, lambda url: print(f"kvstore front ready: {len(workers)} workers behind {url}/v1", flush=True))
    return 0


def _worker_url(text: str) -> str:
    """http://host:port of a worker, named with its /v1 or without. Raises InvalidArgument."""
    parts = server_url(text)
    if parts.path not in ("", "/", "/v1", "/v1/") or parts.query or parts.fragment:
        raise InvalidArgument(f"{text!r} is no worker's address: nothing follows its port; write http://host:port")
    return f"http://{parts.netloc}"
