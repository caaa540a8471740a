"""`kvstore chat`: a conversation in the terminal."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from kvstore.cli.chat_peers import Partner, Reply, Wishes, in_process, over_http
from kvstore.cli.text import utf8
from kvstore.errors import InvalidArgument, KVStoreError

NAME = "chat"
HELP = """Talk with a language model in the terminal. Each turn takes the turns before it from the store.

With --url it talks to a running worker (kvstore worker), or to any server that speaks OpenAI's chat completions; KVSTORE_API_KEY in the
environment is sent as the key. Without it the model runs in this process, on the daemon's store where one answers.

  /reset   begin a new conversation      /quit   leave (or Ctrl-D)      Ctrl-C while an answer comes: stop that answer"""
_COMMANDS = "/reset begins a new conversation, /quit leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--url", metavar="URL", help="a running worker, as http://127.0.0.1:8000 (default: the model in this process)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.7, help="0: always the likeliest word (default %(default)s)")
    parser.add_argument("--seed", metavar="N", type=int, help="answers that can be repeated")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=512, help="tokens of one answer at most (default %(default)s)")
    parser.add_argument(
        "--window", metavar="N", type=int, default=0,
        help="talk on without an end: the model sees the first tokens and the last N, and nothing comes from the store",
    )  # fmt: skip
    parser.add_argument("--stats", action="store_true", help="after each answer: tokens that came from the store, and how long it took")
    here = parser.add_argument_group("without --url")
    here.add_argument("--model", metavar="FOLDER", type=Path, help="the model's folder (default: the bundled SmolLM2-135M-Instruct)")
    here.add_argument("--listen", "--address", metavar="SOCKET", help="the daemon's socket, or host:port (default: the usual socket)")


def run(args: argparse.Namespace) -> int:
    """Talk until the input ends; returns the exit status."""
    wishes = Wishes(args.temperature, args.max_tokens, args.seed, args.window)
    partner = over_http(args.url, wishes) if args.url else in_process(args.model, args.listen, wishes, _note)
    try:
        if sys.stdin.isatty():
            _note(f"{partner.name}; {_COMMANDS}")
        _talk(partner, _beginning(args.system), args.stats)
    finally:
        partner.close()
    return 0


def _talk(partner: Partner, beginning: list[dict[str, str]], stats: bool) -> None:
    messages = list(beginning)
    for line in _lines():
        if line in ("/quit", "/exit"):
            return
        if line == "/reset":
            messages = list(beginning)
        elif line.startswith("/"):
            _note(f"{line.split()[0]} is no command: {_COMMANDS}")
        else:
            messages.append({"role": "user", "content": line})
            reply = _answer(partner, messages)
            if reply is None:
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": reply.text})
            if stats:
                _note(_shown(reply))


def _beginning(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": utf8(system, "--system")}] if system else []


def _answer(partner: Partner, messages: list[dict[str, str]]) -> Reply | None:
    """What was answered, shown as it came; None where that failed or was stopped."""
    try:
        return partner.ask(messages, lambda text: print(text, end="", flush=True))
    except KVStoreError as error:
        _note(str(error))
    except KeyboardInterrupt:
        _note("stopped; this turn is forgotten")
    finally:
        print(flush=True)
    return None


def _lines() -> Iterator[str]:
    """What is typed or piped in, line by line, without empty lines."""
    asks = sys.stdin.isatty()
    if asks:
        import readline  # noqa: F401  gives `input` line editing and history
    while True:
        try:
            line = utf8(input("> " if asks else ""), "standard input").strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"standard input: {error}; give text in UTF-8") from error
        if line:
            yield line


def _shown(reply: Reply) -> str:
    made_s = reply.took_s - reply.first_s
    rate = f", then {(reply.made_tokens - 1) / made_s:.1f} tokens a second" if reply.made_tokens > 1 and made_s > 0 else ""
    return (
        f"{reply.cached_tokens} of {reply.prompt_tokens} prompt tokens from the store, first token after "
        f"{reply.first_s * 1000:.0f} ms{rate}"
    )


def _note(text: str) -> None:
    print(f"kvstore: {text}", file=sys.stderr, flush=True)
