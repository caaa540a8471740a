"""Finds the sub-command's module, hands it the arguments, and turns the store's errors into a line and an exit status."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from kvstore import __version__
from kvstore.errors import KVStoreError

EXIT_FAULT = 2  # exit status: the store, its settings or the machine is at fault; argparse uses the same for bad usage
EXIT_INTERRUPTED = 130  # exit status: 128 + SIGINT, as shells expect
EXIT_NO_READER = 141  # exit status: 128 + SIGPIPE, likewise, where whoever reads the output has left

# Each is a module beside this one, in the order that `--help` shows them.
COMMANDS = (
    "demo",
    "serve",
    "worker",
    "front",
    "chat",
    "generate",
    "lookup",
    "explain",
    "namespaces",
    "stats",
    "clear",
    "plan",
    "fsck",
    "bench",
)


class Command(Protocol):
    """What a module in this folder offers. Importing it must be cheap: torch and its like belong inside `run`."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. `argv` is without the program's name; None takes the process's own. Returns the exit status."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return EXIT_NO_READER


def _run(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvstore", description="Keeps attention keys and values so that no prompt is computed twice.")
    parser.add_argument("--version", action="version", version=f"kvstore {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in _wanted(words):
        command = cast(Command, importlib.import_module(f"kvstore.cli.{name}"))
        summary = command.HELP.splitlines()[0]
        sub = commands.add_parser(
            command.NAME, help=summary, description=command.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run, usage_error=sub.error)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        args.usage_error(f"unrecognized arguments: {' '.join(unknown)}")  # with the command's usage, not the program's
    try:
        return int(args.run(args))
    except KVStoreError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return EXIT_FAULT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _wanted(words: Sequence[str]) -> Sequence[str]:
    """Only the command that was asked for; all of them where the words name none, for the help and the usage error."""
    first = words[0].replace("-", "_") if words else ""
    return (first,) if first in COMMANDS else COMMANDS
