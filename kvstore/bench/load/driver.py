"""The process of one engine: one line of JSON a command on stdin, one line of JSON an answer on stdout.

Runs under the Python of the engine's own venv, so it imports nothing of kvstore.

    python driver.py PATH_OF_THE_ENGINES_MODULE '{"model": "/…", "memory_bytes": …, …}'

The first line that it writes is the engine's `about`, or {"error": ...}. Then, until stdin ends:

    {"do": "serve", "asked": [[at_s, [tokens], answer_tokens], ...]}        what `Engine.serve` returns
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import traceback
from typing import Any, Protocol


class Engine(Protocol):
    """What an engine's module makes with `open_engine(work)`. Times are seconds since `serve` was called, by the same clock."""

    def about(self) -> dict[str, str]:
        """`version`, and `how` it is run."""

    def serve(self, asked: list[list[Any]]) -> dict[str, Any]:
        """Take each request when its time has come, and wait until all are answered.

        Returns `answers`: for each request {"tokens": [...], "token_at_s": [...], "started_at_s": the prompt's computation begins};
        and `figures`: counters by name, among them hit_tokens and preemptions as far as the engine tells; `fault`: why the run is void.
        """

    def close(self) -> None:
        """End it."""


def main(module_path: str, work: dict[str, Any]) -> int:
    """Run one engine. Returns the exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints goes to the log

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        spec = importlib.util.spec_from_file_location("engine_module", module_path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{module_path} is no module")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        engine: Engine = module.open_engine(work)
        answer(engine.about())
        for line in sys.stdin:
            answer(engine.serve(json.loads(line)["asked"]))
        engine.close()
    except Exception as error:  # noqa: BLE001 — whatever befalls an engine is reported, not raised
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.path.pop(0)  # this folder's names are no modules for the engine's packages to find
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
