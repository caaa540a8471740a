"""One batch of each kind of model meets everything at once: chunks, forks, too little memory, the disk, a daemon that is killed.

Compared with transformers' own generate, in fp32, token for token.
"""

from __future__ import annotations

import time

import pytest

from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.engine import Engine, Options
from kvstore.worker.requests import Request
from kvstore.worker.scheduler import Rules
from tests.worker import kinds
from tests.worker.stores import BLOCK_TOKENS, Watched, prompt

TRIES, PAUSE_S = 200, 0.05  # tries, and seconds between them: a daemon is back within a second or two
LENGTH, TOKENS, TEXTS = 60, 36, 6
LEFT_BLOCKS = 30  # blocks that there is room for: each text needs 13 at its end


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "deepseek-v3"])
def test_whatever_happens_to_a_batch_its_tokens_are_those_of_transformers(kind: str) -> None:
    loaded = kinds.load(kind)
    geometry = loaded.geometry(BLOCK_TOKENS)
    requests = [Request(prompt(LENGTH + seed, seed=seed), TOKENS, n=2 if seed == 1 else 1) for seed in range(TEXTS)]
    expected = [[kinds.expected(loaded, request.tokens, TOKENS)] * request.n for request in requests]
    with DaemonProcess(dram="2MiB", nvme_bytes="16MiB") as daemon:
        with KVClient(daemon.address) as client:
            store = Watched(client.open_blocks(loaded.identity, geometry))
            other = client.open_blocks(loaded.identity, geometry)
        assert len(other.reserve((2 << 20) // geometry.slot_bytes - LEFT_BLOCKS)), "another worker holds most of the memory"
        engine = Engine(loaded, store, Options(Rules(step_tokens=24), patience_s=30.0, keep_logits=False))

        def made(some: list[Request]) -> list[list[list[int]]]:
            return [[each.tokens for each in branches] for branches in engine.generate_all(some)]

        assert made(requests) == expected
        assert engine.figures()["preemptions_total"] > 0
        assert made(requests) == expected, "what memory and the disk have kept"
        assert engine.figures()["hit_tokens_total"] > 0

        strikes: list[int] = []

        def strike(*_: object) -> None:
            if not strikes:
                strikes.append(daemon.pid)
                daemon.restart()

        store.on_commit = strike
        unknown = [Request(prompt(LENGTH, seed=9), TOKENS), *requests]
        assert made(unknown)[1:] == expected
        assert strikes
        for _ in range(TRIES):
            done = engine.generate(requests[:1])[0]
            assert done.tokens == expected[0][0]
            if done.hit_tokens and not done.store_fault:
                break
            time.sleep(PAUSE_S)
        assert done.hit_tokens, "the daemon that came back is not used"
        engine.close()
        store.close()
        other.close()
