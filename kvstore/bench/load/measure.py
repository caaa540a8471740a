"""Each engine in turn serves the same requests, after a warm-up of its own; how each is started; a daemon for the one that wants it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.bench.load.prompts import Asked
from kvstore.bench.peers.pipe import Driver, PeerFailed
from kvstore.errors import InvalidArgument
from kvstore.testing.daemon import DaemonProcess

HERE = Path(__file__).parent
OURS = "kvstore"
ANSWER_TIMEOUT_S = 2400.0  # seconds for one engine's whole run, its start included
PAGE_TOKENS = 16  # tokens of a page of transformers: as finely shared as here
ENGINES = {
    OURS: "the worker's engine, over a store of its own",
    "kvstore-daemon": "the worker's engine, over a daemon's store",
    "transformers": "transformers' own continuous batching, its prefix sharing on",
    "transformers-unshared": "the same with its prefix sharing off",
    "vllm": "vLLM on the CPU, as it is by default",
}


@dataclass(frozen=True)
class Work:
    """What every engine is told, as JSON: see the drivers. `memory_bytes` are those of its KV cache."""

    model: str
    positions: int
    token_bytes: int
    memory_bytes: int
    step_tokens: int
    running: int
    requests: int
    threads: int
    page_tokens: int = PAGE_TOKENS


@dataclass
class Result:
    """What one engine did; `reason`: why it could not."""

    name: str
    about: dict[str, str] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Places:
    """Where venvs lie, and logs and a daemon's files go; who is told what happens."""

    venvs: Path
    directory: Path
    tell: Callable[[str], None]


def measure(names: Sequence[str], work: Work, asked: Sequence[Asked], warming: Sequence[Asked], places: Places) -> list[Result]:
    """All of them, one after another."""
    return [_one(name, work, asked, warming, places) for name in names]


def _one(name: str, work: Work, asked: Sequence[Asked], warming: Sequence[Asked], places: Places) -> Result:
    result = Result(name)
    places.tell(f"{name}: {ENGINES[name]}")
    with ExitStack() as stack:
        try:
            command, environment = _command(name, work, places, stack)
            log = places.directory / f"{name}.log"
            driver = stack.enter_context(Driver(command, log, environment, ANSWER_TIMEOUT_S))
            result.about = driver.about
            driver.ask("serve", asked=_plain(warming))
            found = driver.ask("serve", asked=_plain(asked))
        except PeerFailed as error:
            result.reason = str(error)
            return result
    result.answers, result.figures, result.reason = found["answers"], found["figures"], found["fault"] or _missing(found["answers"], asked)
    return result


def _plain(asked: Sequence[Asked]) -> list[list[Any]]:
    return [[each.at_s, each.tokens, each.answer_tokens] for each in asked]


def _missing(answers: Sequence[Mapping[str, Any]], asked: Sequence[Asked]) -> str:
    short = [index for index, (answer, each) in enumerate(zip(answers, asked, strict=True)) if len(answer["tokens"]) != each.answer_tokens]
    return f"{len(short)} requests have no whole answer, the first is number {short[0]}" if short else ""


def _command(name: str, work: Work, places: Places, stack: ExitStack) -> tuple[list[str], dict[str, str]]:
    """The process of an engine, and its environment. Raises PeerFailed where it is not installed."""
    told: dict[str, Any] = vars(work)
    python, module, environment = Path(sys.executable), name.split("-")[0], {"OMP_NUM_THREADS": str(work.threads), "HF_HUB_OFFLINE": "1"}
    if name == "kvstore-daemon":
        daemon = stack.enter_context(DaemonProcess(places.directory / "daemon", dram=str(work.memory_bytes), nvme=False))
        told = told | {"address": daemon.address}
    elif module == "transformers":
        told = told | {"sharing": name == "transformers"}
    if module == OURS:  # as kvstore.worker sets it, which is imported after torch there
        environment["GOMP_SPINCOUNT"] = "1000"
    if name == "vllm":
        python = (places.venvs / ".venv-vllm" / "bin" / "python").absolute()
        if not python.exists():
            raise PeerFailed(f"{python} is not there; `make {python.parent.parent.name}/.installed` makes it")
        told = told | {"vllm": {"enforce_eager": True}}
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, work.memory_bytes >> 30)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return [str(python), str(HERE / "driver.py"), str(HERE / f"drive_{module}.py"), json.dumps(told)], environment


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def checked(names: str) -> list[str]:
    """Names of engines, separated by commas; all for none. Raises InvalidArgument for one that is none."""
    wanted = [name for name in names.split(",") if name] or list(ENGINES)
    if unknown := [name for name in wanted if name not in ENGINES]:
        raise InvalidArgument(f"--only: {unknown[0]!r} is none; give some of {', '.join(ENGINES)}")
    return wanted


def warm_up(asked: Sequence[Asked]) -> list[Asked]:
    """The same requests as strangers: their tokens in reverse order, all at once, so that nothing of them is found in the measured run."""
    return [replace(each, at_s=0.0, tokens=each.tokens[::-1]) for each in asked]
