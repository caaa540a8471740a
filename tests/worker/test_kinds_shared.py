"""Every kind of attention through a real daemon: one worker computes, another that has never seen the prompt takes it from the store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.clients.client import KVClient
from kvstore.hashing import usable_blocks
from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.engine import Engine
from kvstore.worker.requests import Request
from tests.worker.kinds import KINDS, WINDOW, expected, load
from tests.worker.stores import BLOCK_TOKENS, prompt

LONG = 3 * WINDOW + 8  # tokens of a prompt that no window can hold
TOKENS = 10  # made by each run
FLUSH_S = 60.0  # seconds: a commit takes a millisecond; a busy machine may not run the daemon for many


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(nvme=False) as process:
        yield process


@pytest.mark.parametrize("kind", KINDS)
def test_another_worker_hits_and_makes_generate_s_tokens(kind: str, daemon: DaemonProcess) -> None:
    loaded = load(kind)
    wanted = expected(loaded, prompt(LONG), TOKENS)
    for hits in (0, usable_blocks(LONG, BLOCK_TOKENS) * BLOCK_TOKENS):
        with KVClient(daemon.address) as client:
            store = client.open_blocks(loaded.identity, loaded.geometry(BLOCK_TOKENS))
        engine = Engine(loaded, store)
        done = engine.generate([Request(prompt(LONG), TOKENS)])[0]
        assert (done.tokens, done.hit_tokens, done.store_fault) == (wanted, hits, "")
        engine.close()
        assert store.flush(FLUSH_S)
        store.close()
