"""A socket for lookups at which so many wait that the system refuses more: the daemon is asked over gRPC instead."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvstore.clients.aio_quick import AsyncQuickLookups
from kvstore.clients.quick import QuickLookups
from kvstore.proto import kvstore_pb2 as pb

REQUEST = pb.LookupRequest(namespace_id=1, epoch="e" * 16, hashes=bytes(32))
TIMEOUT_S = 5.0  # seconds: far longer than being refused takes


@pytest.fixture
def crowded() -> Iterator[str]:
    """The address of a daemon whose socket for lookups lets nobody in any more."""
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvq-"))) / "s.sock"
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(f"{path}.lookup")
        server.listen(0)
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            try:
                waiting.connect(f"{path}.lookup")
            except BlockingIOError:
                break
        yield f"unix:{path}"


def test_the_client_takes_the_other_way(crowded: str) -> None:
    assert QuickLookups(crowded).ask(REQUEST, TIMEOUT_S) is None


def test_the_asyncio_client_takes_the_other_way(crowded: str) -> None:
    async def ask() -> object:
        return await AsyncQuickLookups(crowded).ask(REQUEST, TIMEOUT_S)

    assert asyncio.run(ask()) is None
