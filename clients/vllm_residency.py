"""Where blocks of interest are, as the store itself tells: which tiers have them now, and what changed since it was last asked.

A thread for each member (a rank's namespace) listens to the store's notices; a block counts as being in a tier where all members have it
there. Nothing is believed of a store that is away. Other calls come from one thread, and none of them waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore import errors
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Watched
from kvstore.clients.requests import KEEP_ALL, Keep
from kvstore.geometry import Geometry
from kvstore.hashing import HASH_BYTES, Identity

RETRY_S = 1.0  # seconds between attempts to listen to a daemon that is away


@dataclass(frozen=True)
class Member:
    """What opens the namespace of one rank and KV cache group."""

    identity: Identity
    geometry: Geometry
    shard: str
    kv_group: str = ""
    keep: Keep = KEEP_ALL


@dataclass(frozen=True)
class Change:
    """A block came into a tier (`here`), or is there no more."""

    block: bytes
    tier: str
    here: bool


class Residency:
    """See the module's text."""

    def __init__(self, place: str, members: Sequence[Member]) -> None:
        self._place, self._members = place, members
        self._guard = threading.Lock()  # over what the threads and the caller share
        self._where: dict[bytes, set[tuple[int, str]]] = {}  # of each block that is followed: members and tiers
        self._told: dict[bytes, set[str]] = {}
        self._changed: dict[bytes, None] = {}  # in the order in which it was heard
        self._again: set[bytes] = set()  # to be told of once more, as if they had just come
        self._closed = threading.Event()
        self._clients: list[KVClient] = []
        self._threads: list[threading.Thread] = []  # started with the first block: they do not survive a fork

    def follow(self, blocks: Iterable[bytes], *, leased: bool = False) -> None:
        """Tell of these blocks from now on. `leased`: in memory at this moment, kept there by a lease; that is told anew."""
        self._run_threads()
        with self._guard:
            for block in blocks:
                where = self._where.setdefault(block, set())
                if leased:
                    where.update((member, "dram") for member in range(len(self._members)))
                    self._changed[block] = None
                    self._again.add(block)

    def forget(self, block: bytes) -> set[str]:
        """Tell no more of a block. The tiers in which it was said to be."""
        with self._guard:
            self._where.pop(block, None)
            self._changed.pop(block, None)
            self._again.discard(block)
            return self._told.pop(block, set())

    def is_somewhere(self, block: bytes) -> bool:
        """Whether a member has the block, or it is not followed."""
        with self._guard:
            return bool(self._where.get(block, True))

    def changes(self) -> list[Change]:
        """What came and went since this was last called: first what went."""
        with self._guard:
            changed, self._changed = list(self._changed), {}
            came, went = [], []
            for block in changed:
                now = self._tiers(block)
                before = self._told.get(block, set())
                went += [Change(block, tier, here=False) for tier in sorted(before - now)]
                came += [Change(block, tier, here=True) for tier in sorted(now if block in self._again else now - before)]
                self._told[block] = now
            self._again.clear()
        return went + came

    def stop(self) -> None:
        """End the threads, without waiting for them."""
        self._closed.set()
        for client in self._clients:
            client.close()

    def close(self) -> None:
        """End the threads."""
        self.stop()
        for thread in self._threads:
            thread.join(RETRY_S)

    def _tiers(self, block: bytes) -> set[str]:
        where = self._where.get(block, set())
        return {tier for _, tier in where if all((member, tier) in where for member in range(len(self._members)))}

    # ---- a member's thread

    def _run_threads(self) -> None:
        if not self._threads:
            for number, member in enumerate(self._members):
                client = KVClient(self._place, name="vllm-events")
                self._clients.append(client)
                thread = threading.Thread(target=self._listen, args=(number, member, client), name="kvstore-events", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _listen(self, number: int, member: Member, client: KVClient) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(
                errors.KVStoreError, ValueError
            ):  # the daemon is away, or we are slow; a closed channel is a ValueError
                namespace = client.open_namespace(member.identity, member.geometry, member.shard, member.kv_group, member.keep)
                for at, event in enumerate(client.watch(namespace)):
                    if at == 0:
                        self._lose(number)  # what was believed meanwhile; the snapshot begins with this event
                    self._hear(number, event)
            self._lose(number)
            self._closed.wait(RETRY_S)

    def _hear(self, number: int, event: Watched) -> None:
        if event.kind == "cleared":
            self._lose(number)
        with self._guard:
            for start in range(0, len(event.hashes), HASH_BYTES):
                block = event.hashes[start : start + HASH_BYTES]
                where = self._where.get(block)
                if where is None:
                    continue
                if event.kind == "removed":
                    where.discard((number, event.tier))
                else:
                    where.add((number, event.tier))
                self._changed[block] = None

    def _lose(self, number: int) -> None:
        """Nothing is believed of this member any more."""
        with self._guard:
            for block, where in self._where.items():
                if gone := {each for each in where if each[0] == number}:
                    where -= gone
                    self._changed[block] = None
