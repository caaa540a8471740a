"""What the daemon has said to be on disk, and so has to find again after any crash."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Self

from kvstore import errors
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Watched
from kvstore.hashing import HASH_BYTES

Block = tuple[bytes, bytes]  # the namespace's digest, the block's hash
ATTEMPTS = 5  # attempts at a snapshot
PAUSE_S = 0.2  # seconds between them
SNAPSHOT_S = 30.0  # seconds for a snapshot to arrive: it takes milliseconds


class Watch:
    """One watcher of one run of the daemon, in a thread of its own. Use it in a `with` block; `on_disk` grows and shrinks meanwhile.

    Each event is booked whole: what `on_disk` holds at any moment, the daemon has said.
    """

    def __init__(self, address: str) -> None:
        self.on_disk: set[Block] = set()
        self.found: set[Block] = set()  # in the snapshot: what was there when the watch began
        self.sequence = 0
        self.faults: list[str] = []
        self.whole = False  # the snapshot has come, all of it
        self.error: errors.KVStoreError | None = None
        self._client = KVClient(address, name="watch")
        self._snapshot = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._snapshot.wait(SNAPSHOT_S) or not self.whole:
            raise AssertionError(f"no snapshot: {self.error}")
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._thread.join(SNAPSHOT_S)

    def end(self) -> None:
        """The daemon was killed: take what it had sent by then."""
        self._thread.join(SNAPSHOT_S)

    def _run(self) -> None:
        for _ in range(ATTEMPTS):
            self._watch()
            if self.whole:
                break
            time.sleep(PAUSE_S)  # the daemon has only just begun to listen
        self._snapshot.set()

    def _watch(self) -> None:
        epoch, self.sequence, self.on_disk = "", 0, set()
        try:
            for event in self._client.watch():
                if event.sequence != self.sequence + 1 or epoch not in ("", event.epoch):
                    self.faults.append(f"event {event.sequence} of epoch {event.epoch} after {self.sequence} of {epoch}")
                self.sequence, epoch = event.sequence, event.epoch
                self._book(event)
        except errors.KVStoreError as error:
            self.error = error  # the daemon is gone, or the test has had enough

    def _book(self, event: Watched) -> None:
        blocks = list(_blocks(event))
        match event.kind:
            case "snapshot_end":
                self.found, self.whole = set(self.on_disk), True
                self._snapshot.set()
            case "cleared":
                self.on_disk = {block for block in self.on_disk if block[0] != event.digest}
            case "removed" if event.tier == "nvme":
                self.on_disk.difference_update(blocks)
            case "snapshot" | "stored" if event.tier == "nvme":
                self.on_disk.update(blocks)


def _blocks(event: Watched) -> Iterator[Block]:
    for start in range(0, len(event.hashes), HASH_BYTES):
        yield event.digest, event.hashes[start : start + HASH_BYTES]
