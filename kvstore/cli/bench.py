"""`kvstore bench`: the benchmarks and the replayer. Each is a module of `kvstore.bench` by its name."""

import argparse
import importlib
from typing import cast

from kvstore.cli.main import Command
from kvstore.errors import ConfigError

# Each is a module of kvstore.bench that offers what a command offers. A new one is a line here.
BENCHES = {
    "kernels": "the CUDA kernels: predicted for each shape, and measured where a GPU is",
    "decode": "the CPU's decode attention in place, beside torch on contiguous and on gathered K and V",
    "prefill": "the CPU's attention of a prompt in place, beside torch on contiguous K and V",
    "data": "put and get through a real daemon, beside memcpy and raw O_DIRECT of the same run",
    "scale": "memory and time a block as the index grows to ten million, and the start from disk",
    "load": "the worker's engine under arriving requests, beside transformers' batching and vLLM, on the same ones",
    "disagg": "a worker for prompts and one for texts, beside two for both, under long prompts among texts",
    "multiturn": "conversations that go on after their KV went to the disk, with the store and without it",
    "peers": "beside LMCache's server, Mooncake Store and Redis, on the same work",
    "tails": "tokens found with partial tails and without, on a made-up conversation load",
    "replay": "how much of a trace's prompts a cache of each size would have kept from being computed",
}

NAME = "bench"
HELP = "\n".join(
    ["Measure the store, or replay a trace through it.", "", *(f"  kvstore bench {name:<9} {text}" for name, text in BENCHES.items())]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which benchmark; its own arguments are declared when it is known."""
    parser.add_argument("bench", choices=BENCHES, help="which one; its --help shows its arguments")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Run one benchmark; returns its exit status."""
    try:
        bench = cast(Command, importlib.import_module(f"kvstore.bench.{args.bench}"))
    except ModuleNotFoundError as error:
        raise ConfigError(f"this benchmark needs {error.name}; pip install 'kvstore[worker]'") from error
    parser = argparse.ArgumentParser(
        prog=f"kvstore bench {bench.NAME}", description=bench.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(args.words))
