"""The worker's engine, over a store of its own or a daemon's. Run by driver.py."""

from __future__ import annotations

import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvstore.cache.messages import Tier
from kvstore.clients.blocks import BlockStore
from kvstore.clients.client import KVClient
from kvstore.worker.engine import Engine, Options
from kvstore.worker.model import load_model
from kvstore.worker.opening import open_shared
from kvstore.worker.requests import Ended, Event, Finish, Made, Request, Started
from kvstore.worker.scheduler import Rules
from kvstore.worker.serving import EngineThread
from kvstore.worker.standalone import StandaloneStore

ANSWERS_DEADLINE_S = 1800.0  # seconds for all answers: far beyond any load that one would wait for
FLUSH_S = 10.0  # seconds for the last commits to be answered
POLL_S = 0.05  # seconds between two looks at what is still held
COUNTED = {"hit_tokens": "hit_tokens_total", "preemptions": "preemptions_total", "steps": "steps_total"}


class Heard:
    """What the engine told of one request."""

    def __init__(self, began_at: float, left: threading.Semaphore) -> None:
        self._began_at, self._left = began_at, left
        self.started_at_s, self.token_at_s, self.tokens = 0.0, list[float](), list[int]()
        self.ended: Ended | None = None

    def __call__(self, event: Event) -> None:
        now_s = time.perf_counter() - self._began_at
        match event:
            case Started():
                self.started_at_s = now_s
            case Made(_, choice):
                self.tokens.append(choice.token)
                self.token_at_s.append(now_s)
            case Ended():
                self.ended = event
                self._left.release()


class Ours:
    """An engine thread, its store, and who to ask what the store holds."""

    def __init__(self, work: dict[str, Any]) -> None:
        torch.set_num_threads(work["threads"])
        loaded = load_model(Path(work["model"]), torch.bfloat16)
        self._address: str = work.get("address", "")
        self._store: BlockStore = (
            open_shared(loaded, self._address, name="bench")
            if self._address
            else StandaloneStore(loaded.identity, loaded.geometry(), work["memory_bytes"])
        )
        rules = Rules(step_tokens=work["step_tokens"], running=work["running"])
        engine = Engine(loaded, self._store, Options(rules, keep_logits=False, native=True))  # as `kvstore worker` serves
        self._serving = EngineThread(engine, max_waiting=work["requests"] + 1)

    def about(self) -> dict[str, str]:
        """Version, and how it is run."""
        return {"version": f"kvstore {version('kvstore')}", "how": "a daemon's store" if self._address else "a store of its own"}

    def serve(self, asked: list[list[Any]]) -> dict[str, Any]:
        """See driver.py."""
        before, left = self._serving.figures(), threading.Semaphore(0)
        began_at = time.perf_counter()
        heard = [Heard(began_at, left) for _ in asked]
        for (at_s, tokens, answer_tokens), each in zip(asked, heard, strict=True):
            time.sleep(max(0.0, began_at + at_s - time.perf_counter()))
            self._serving.submit(Request(tokens, answer_tokens, ignore_eos=True), each)
        for _ in heard:
            if not left.acquire(timeout=ANSWERS_DEADLINE_S):
                raise RuntimeError(f"no answer within {ANSWERS_DEADLINE_S:.0f} s")
        figures = self._serving.figures()
        return {
            "answers": [{"tokens": each.tokens, "token_at_s": each.token_at_s, "started_at_s": each.started_at_s} for each in heard],
            "figures": {name: figures.get(counter, 0) - before.get(counter, 0) for name, counter in COUNTED.items()},
            "fault": self._fault(heard),
        }

    def close(self) -> None:
        """End it."""
        self._serving.close()
        self._store.close()

    def _fault(self, heard: list[Heard]) -> str:
        """Answers that are not whole, and what is still held although nothing runs; "" where nothing is."""
        failed = [str(each.ended.error) for each in heard if each.ended and each.ended.finish is not Finish.LENGTH]
        idle = threading.Event()

        def look(engine: Engine) -> None:
            engine.step()  # with nothing to do it gives back what it has ahead
            idle.set()

        self._serving.ask(look)
        idle.wait(FLUSH_S)
        self._store.flush(FLUSH_S)
        until = time.monotonic() + FLUSH_S
        while any((held := {"blocks": self._serving.figures()["held_blocks"]} | self._held_in_store()).values()):
            if time.monotonic() > until:
                break
            time.sleep(POLL_S)  # what is given back is told without waiting for an answer
        leaks = [f"{count:g} {what} still held" for what, count in held.items() if count]
        return "; ".join([*failed[:1], *leaks])

    def _held_in_store(self) -> dict[str, float]:
        if isinstance(self._store, StandaloneStore):
            figures = self._store.stats().tiers[Tier.DRAM]
            return {"leased bytes": figures.held_bytes, "reserved bytes": figures.class_bytes["reserved"]}
        with KVClient(self._address) as client:
            mine = [session for session in client.stats().sessions if not session.ended]
        return {
            "leased bytes": sum(session.held_bytes for session in mine),
            "leases": sum(session.leases for session in mine),
            "reserved slots": sum(session.reserved_slots for session in mine),
        }


def open_engine(work: dict[str, Any]) -> Ours:
    """The engine."""
    return Ours(work)
