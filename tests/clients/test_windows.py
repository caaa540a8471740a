"""A namespace that keeps a window of a sequence: what lies before it is an array of no bytes, never somebody else's block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvstore.clients.handles import Namespace
from kvstore.clients.requests import Keep
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import BLOCK_TOKENS, GEOMETRY, IDENTITY, chain, each_hash, pattern
from tests.clients.kinds import KINDS, Client, make

BLOCKS = 7  # more than a reader's share on the way over gRPC
WINDOW_BLOCKS = 2


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    made = make(request.param, daemon.address, monkeypatch)
    yield made
    made.close()


def store(client: Client, namespace: Namespace, hashes: bytes) -> None:
    with client.put(namespace, hashes) as put:
        for block in put.blocks:
            block.write(pattern(block.hash))


def test_only_the_window_of_a_prefix_has_bytes(client: Client) -> None:
    store(client, client.open_namespace(IDENTITY, GEOMETRY), chain(9, BLOCKS))  # the arena's first slots are another's
    keep = Keep("window", WINDOW_BLOCKS * BLOCK_TOKENS)
    namespace: Namespace = cast(Any, client).open_namespace(IDENTITY, GEOMETRY, kv_group="window", keep=keep)
    hashes = chain(1, BLOCKS)
    store(client, namespace, hashes)
    with client.get(namespace, hashes) as lease:
        views = [view.tobytes() for view in lease.views]
        target = bytearray(b"x" * GEOMETRY.block_bytes)
        copied = lease.copy_into([target])
    wanted = [pattern(hash_) for hash_ in each_hash(hashes)]
    assert views == [b""] * (BLOCKS - WINDOW_BLOCKS) + [bytes(block) for block in wanted[-WINDOW_BLOCKS:]]
    assert (copied, bytes(target)) == (1, b"x" * GEOMETRY.block_bytes)
