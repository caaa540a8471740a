"""A worker process behind a pipe: one JSON object a line in, one out, in order. Private to this program; `kvstore demo` drives it.

    python -m kvstore.worker [--listen SOCKET] [--model FOLDER]

    {"op": "encode", "text"}                                    → {"tokens"}
    {"op": "generate", "tokens", "max_tokens", "salt"}          → an answer, with the store
    {"op": "plain", "tokens", "max_tokens", "split"}            → an answer, by transformers alone
    {"op": "reach", "timeout_s"}                                → {"reached"}: the store answers, again where it was gone
An answer has tokens, first_logits (a digest of their bits), ttft_s, and with the store hit_tokens, store_fault, timings.
Where something went wrong the object is {"error"}. The first line out is {"ready": true}. The loop ends with its input.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvstore.clients.blocks import BlockStore
from kvstore.errors import KVStoreError, Unavailable
from kvstore.worker.engine import Engine
from kvstore.worker.model import LoadedModel, load_model
from kvstore.worker.opening import open_shared
from kvstore.worker.plain import generate_plain
from kvstore.worker.requests import Request

FLUSH_TIMEOUT_S = 10.0  # for the commits of one answer to be acknowledged
REACH_PAUSE_S = 0.1  # between two tries to reach a store that is away


class Loop:
    """The operations, over one model and one store."""

    def __init__(self, loaded: LoadedModel, store: BlockStore) -> None:
        self._loaded, self._store = loaded, store
        self._engine = Engine(loaded, store)
        self._operations: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "encode": self._encode,
            "generate": self._generate,
            "plain": self._plain,
            "reach": self._reach,
        }

    def answer(self, line: str) -> dict[str, Any]:
        """The reply to one line."""
        try:
            asked = json.loads(line)
            return self._operations[asked["op"]](asked)
        except KVStoreError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        except (ValueError, KeyError, TypeError) as error:
            return {"error": f"not a request of this loop: {error!r}"}

    def close(self) -> None:
        """Give everything back."""
        self._engine.close()
        self._store.close()

    def _encode(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return {"tokens": self._loaded.encode(str(asked["text"]))}

    def _generate(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        done = self._engine.generate([Request(asked["tokens"], int(asked["max_tokens"]), str(asked["salt"]))])[0]
        self._store.flush(FLUSH_TIMEOUT_S)
        if done.error is not None or done.first_logits is None:
            return {"error": f"generation failed: {done.error}"}
        return {
            "tokens": done.tokens,
            "first_logits": _digest(done.first_logits),
            "ttft_s": done.timings.ttft_s,
            "hit_tokens": done.hit_tokens,
            "store_fault": done.store_fault,
            "timings": vars(done.timings),
        }

    def _plain(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        done = generate_plain(self._loaded, asked["tokens"], int(asked["max_tokens"]), int(asked["split"]))
        return {"tokens": done.tokens, "first_logits": _digest(done.first_logits), "ttft_s": done.ttft_s}

    def _reach(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        until = time.monotonic() + float(asked["timeout_s"])
        while True:
            try:
                self._store.abandon(self._store.reserve(1))
            except Unavailable as error:
                if time.monotonic() > until:
                    return {"error": f"the store cannot be reached: {error}"}
                time.sleep(REACH_PAUSE_S)
            else:
                return {"reached": True}


def _digest(logits: Tensor) -> str:
    """A digest of the bits."""
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    """Serve standard input until it ends. What libraries print goes to standard error."""
    parser = argparse.ArgumentParser(prog="python -m kvstore.worker")
    parser.add_argument("--listen", default=None)
    parser.add_argument("--model", type=Path, default=None)
    args = parser.parse_args()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    loaded = load_model(args.model)
    loop = Loop(loaded, open_shared(loaded, args.listen, name=f"worker {os.getpid()}"))
    try:
        print(json.dumps({"ready": True}), file=replies, flush=True)
        for line in sys.stdin:
            print(json.dumps(loop.answer(line)), file=replies, flush=True)
    finally:
        loop.close()
