"""A worker process with a GPU, for tests: one JSON object a line in, one out; and how a test starts it.

python -m tests.worker.gpu.child SOCKET MODEL [--real]     prints {"ready": true}

{"tokens", "max_tokens"} → {"tokens", "hit_tokens", "fault", "lifted", "copies", "recorded", "replayed"}
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch

from kvstore.worker.engine import Engine, Options
from kvstore.worker.gpu.device import Gpu
from kvstore.worker.gpu.opening import find_gpu, move, open_in_pool
from kvstore.worker.opening import Portion
from kvstore.worker.requests import Request
from tests.worker.gpu.fake import FakeGpu
from tests.worker.gpu.models import load
from tests.worker.stores import BLOCK_TOKENS

ROOT = Path(__file__).resolve().parent.parent.parent.parent
FLUSH_S, END_S = 30.0, 60.0  # seconds: for commits to be answered; for the process to end


class Worker:
    """One model on the GPU, over the daemon's pool."""

    def __init__(self, gpu: Gpu, socket: str, model: str) -> None:
        loaded = load(model)
        move(loaded, gpu)
        self._gpu = gpu
        self.store = open_in_pool(loaded, gpu, socket, f"worker of {model}", Portion(block_tokens=BLOCK_TOKENS))
        self.engine = Engine(loaded, self.store, Options(gpu=gpu))

    def generate(self, tokens: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """The answer to a line."""
        done = self.engine.generate([Request(tokens, max_tokens)])[0]
        assert done.error is None, done.error
        flushed = self.store.flush(FLUSH_S)
        graphs = cast(Any, self.engine)._cache.runner.graphs
        found = {"tokens": done.tokens, "hit_tokens": done.hit_tokens, "fault": done.store_fault, "lifted": self.store.lifted_blocks}
        found |= {"recorded": graphs.recorded, "replayed": graphs.replayed, "off": graphs.why_off, "flushed": flushed}
        if isinstance(self._gpu, FakeGpu):
            assert self._gpu.driver.violations == []
            found["copies"] = self._gpu.driver.calls["copy"] + self._gpu.driver.calls["launch"]
        return found


def main() -> int:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("--real", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gpu = cast(Gpu, find_gpu("cuda") if args.real else FakeGpu())
    workers: dict[str, Worker] = {}
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        worker = workers.get(asked["model"])
        if worker is None:
            worker = workers[asked["model"]] = Worker(gpu, args.socket, asked["model"])
        print(json.dumps(worker.generate(asked["tokens"], asked["max_tokens"])), flush=True)
    for worker in workers.values():
        worker.engine.close()
        worker.store.close()
    return 0


class Child:
    """Such a process. Use it in a `with` block."""

    def __init__(self, socket: str, *flags: str) -> None:
        words = [sys.executable, "-m", "tests.worker.gpu.child", socket, *flags]
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._is_ready = False

    def generate(self, model: str, tokens: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """What a model there makes of a prompt."""
        assert self.process.stdin is not None
        if not self._is_ready:
            self._is_ready = bool(self._line().get("ready"))
        self.process.stdin.write(json.dumps({"model": model, "tokens": list(tokens), "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        return self._line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the worker ended with status {self.process.wait(END_S)}")
        return cast(dict[str, Any], json.loads(line))


if __name__ == "__main__":
    sys.exit(main())
