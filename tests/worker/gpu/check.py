"""What `make test-gpu` asks of workers on a GPU: the same steps on a real one and, rehearsed, on one that is not there.

A real daemon process with a pool, and worker processes: their tokens are transformers', one finds in the pool what another computed,
blocks that were displaced come up again, and the daemon is killed in the middle of an answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.worker.gpu.child import Child
from tests.worker.gpu.models import load
from tests.worker.kinds import expected
from tests.worker.stores import BLOCK_TOKENS, prompt

WAIT_S, PAUSE_S = 30.0, 0.02  # seconds: for the daemon to have done something; between two looks
POOL_BYTES = "2MiB"  # the least that a GPU gives: 128 blocks of the small models'
DISPLACING = 17  # prompts of 8 blocks each: more than the pool holds
LONG_TOKENS = 380  # made by the answer under which the daemon is killed: as many as the small models take


def wait_until(holds: Callable[[], bool]) -> None:
    """Raises AssertionError where it does not come to hold."""
    ends_at = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends_at, "what was waited for did not come"
        time.sleep(PAUSE_S)


def blocks_in(daemon: DaemonProcess) -> dict[str, int]:
    """How many blocks each tier has."""
    with KVClient(daemon.address) as client:
        return {tier.tier: tier.blocks for tier in client.stats().tiers}


def check_workers(daemon: DaemonProcess, models: Sequence[str], *flags: str) -> dict[str, Any]:
    """All steps, with a daemon that runs; raises AssertionError where one fails. `flags` go to the worker processes."""
    first, tokens = models[0], prompt(60, seed=1)
    wanted = {model: expected(load(model), tokens, 12) for model in models}
    with Child(daemon.address, *flags) as one, Child(daemon.address, *flags) as other:
        for model in models:
            found = one.generate(model, tokens, 12)
            assert found["tokens"] == wanted[model], f"{model}: {found['tokens']}, transformers makes {wanted[model]}"
        again = other.generate(first, tokens, 12)
        assert (again["tokens"], again["hit_tokens"], again["lifted"]) == (wanted[first], 56, 0), f"the other worker: {again}"
        for at in range(DISPLACING):
            some, before = prompt(65, seed=100 + at), blocks_in(daemon)["dram"]
            one.generate(first, some, 1)
            wait_until(lambda before=before: blocks_in(daemon)["dram"] >= before + 8)  # type: ignore[misc]
        back = other.generate(first, tokens, 12)
        assert (back["tokens"], back["hit_tokens"]) == (wanted[first], 56), f"after they were displaced: {back}"
        assert back["lifted"] == 7, f"{back['lifted']} blocks came up, not 7"
        _killed(daemon, one, first)
        wait_until(lambda: one.generate(first, tokens, 12)["hit_tokens"] == 56)
        last = one.generate(first, tokens, 12)
        assert (last["tokens"], last["fault"]) == (wanted[first], ""), f"after the daemon was back: {last}"
    return {
        "passed": True, "models": len(models), "shared_tokens": again["hit_tokens"], "lifted_blocks": back["lifted"],
        "graphs": {key: last[key] for key in ("recorded", "replayed", "off")},
    }  # fmt: skip


def _killed(daemon: DaemonProcess, worker: Child, model: str) -> None:
    """Kill the daemon under a long answer, which must be right."""
    tokens, answers = prompt(100, seed=3), []
    thread = threading.Thread(target=lambda: answers.append(worker.generate(model, tokens, LONG_TOKENS)))
    before = blocks_in(daemon)["dram"]
    thread.start()
    wait_until(lambda: blocks_in(daemon)["dram"] >= before + len(tokens) // BLOCK_TOKENS + 2)
    daemon.restart()
    thread.join()
    assert answers, "the worker ended with the daemon"
    assert answers[0]["tokens"] == expected(load(model), tokens, LONG_TOKENS), "another answer once the daemon was killed"
