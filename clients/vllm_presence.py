"""Which blocks of a namespace a store has, kept up to date by its notices, so that asking takes no call. Any tier counts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from kvstore import errors
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace, Watched
from kvstore.hashing import HASH_BYTES

log = logging.getLogger("kvstore.vllm")

RETRY_S = 1.0  # seconds between attempts to listen to a daemon that is away


class Presence:
    """About 100 bytes a block. Nothing is there until the first snapshot has come, and while the daemon is away."""

    def __init__(self, client: KVClient, namespace: Callable[[], Namespace]) -> None:
        """client   its own: `stop` closes it

        namespace   opens it; called by the listening thread, again after each interruption
        """
        self._client, self._namespace = client, namespace
        self._tiers: dict[bytes, frozenset[str]] = {}  # replaced whole where it is emptied; reading takes no lock
        self._guard = threading.Lock()  # over the two below
        self._followed: set[bytes] = set()
        self._gone: set[bytes] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="kvstore-presence", daemon=True)
        self._thread.start()

    def has(self, block: bytes) -> bool:
        """Whether some tier has the block, as far as is known."""
        return block in self._tiers

    def __len__(self) -> int:
        return len(self._tiers)

    def follow(self, blocks: Iterable[bytes]) -> None:
        """Remember of these when they go."""
        with self._guard:
            self._followed.update(blocks)
            self._gone.difference_update(blocks)

    def unfollow(self, blocks: Iterable[bytes]) -> None:
        """Remember of these no more."""
        with self._guard:
            self._followed.difference_update(blocks)
            self._gone.difference_update(blocks)

    def gone(self) -> set[bytes]:
        """Of the followed blocks those that went since this was last called; they are followed no more."""
        with self._guard:
            gone, self._gone = self._gone, set()
            self._followed -= gone
        return gone

    def stop(self) -> None:
        """Believe nothing more, and end the thread: the stream that it hears ends with its client."""
        self._stopped.set()
        self._client.close()
        self._tiers = {}

    def _listen(self) -> None:
        while not self._stopped.is_set():
            try:
                for event in self._client.watch(self._namespace()):
                    if self._stopped.is_set():
                        break
                    self._hear(event)
            except errors.ResourceExhausted as error:  # as many listen as may: without us nothing is found, so it must be said
                log.warning("the store's chunks are not found for now: %s", error)
            except (errors.KVStoreError, ValueError):  # the daemon is away, or we are slow; a closed channel is a ValueError
                pass
            self._empty()
            self._stopped.wait(RETRY_S)

    def _hear(self, event: Watched) -> None:
        tiers = self._tiers
        if event.kind == "cleared":
            self._empty()
            return
        for start in range(0, len(event.hashes), HASH_BYTES):
            block = event.hashes[start : start + HASH_BYTES]
            known = tiers.get(block, frozenset())
            now = known - {event.tier} if event.kind == "removed" else known | {event.tier}
            if now:
                tiers[block] = now
            else:
                tiers.pop(block, None)
                self._note({block})

    def _empty(self) -> None:
        self._note(None)
        self._tiers = {}

    def _note(self, gone: set[bytes] | None) -> None:
        """These are gone; None: all."""
        with self._guard:
            self._gone |= self._followed if gone is None else gone & self._followed
