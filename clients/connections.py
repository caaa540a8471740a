"""What a client has open. Nothing here refers to the client, so that one which is dropped without `close` is collected, and this closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass

import grpc
import grpc.aio

from kvstore.clients.aio_link import AsyncLink
from kvstore.clients.aio_quick import AsyncQuickLookups
from kvstore.clients.gpus import Gpus
from kvstore.clients.life import Life
from kvstore.clients.link import Link
from kvstore.clients.quick import QuickLookups


@dataclass(eq=False)
class Connections:
    """Of a KVClient."""

    channel: grpc.Channel
    quick: QuickLookups
    gpus: Gpus
    life: Life
    link: Link | None = None

    def close(self) -> None:
        """Close them. Idempotent."""
        link, self.link = self.link, None
        try:
            if link is not None:
                link.close()
        finally:  # an interrupt in between costs the rest nothing
            self.gpus.close()
            self.quick.close()
            self.channel.close()

    def dropped(self) -> None:
        """The client is gone. Whatever thread collected it must not wait."""
        if not self.life.closed and not self.life.forked:
            threading.Thread(target=self.close, name="kvstore-close", daemon=True).start()


@dataclass(eq=False)
class AsyncConnections:
    """Of an AsyncKVClient."""

    channel: grpc.aio.Channel
    quick: AsyncQuickLookups
    gpus: Gpus
    life: Life
    loop: asyncio.AbstractEventLoop
    link: AsyncLink | None = None
    closing: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Close them. Idempotent."""
        link, self.link = self.link, None
        if link is not None:
            await link.close()
        self.gpus.close()
        self.quick.close()
        await self.channel.close()

    def dropped(self) -> None:
        """The client is gone, on whatever thread. A loop that has ended took its connections along."""
        if not self.life.closed and not self.life.forked:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self.loop.call_soon_threadsafe(self._close_soon)

    def _close_soon(self) -> None:
        self.closing = self.loop.create_task(self.close())  # which refers to this, and the loop to it
