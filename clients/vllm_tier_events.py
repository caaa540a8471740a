"""KV events of the offloading tier, in vLLM's own form: which chunks of this engine the store has. Called by the scheduler's thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent

from kvstore.clients.vllm_presence import Presence

MAX_CHUNKS = 65_536  # chunks that are told of; past it those told of first are said to be gone
OWNER = "kvstore"


class TierEvents:
    """Chunks are told of once they are stored or loaded, and are gone once no tier of the store has them, as far as it told."""

    def __init__(self, presence: Presence, name: Callable[[bytes], bytes], most_chunks: int = MAX_CHUNKS) -> None:
        """name   the store's name of vLLM's key"""
        self._presence, self._name, self._most_chunks = presence, name, most_chunks
        self._told: OrderedDict[bytes, bytes] = OrderedDict()  # vLLM's key, by the store's name
        self._left: set[bytes] = set()  # names of chunks that were gone before they were told of
        self._ready: list[OffloadingEvent] = []

    def expect(self, keys: Iterable[bytes]) -> None:
        """A copy of these begins: from now on it counts if one goes."""
        self._hear()  # what went before this copy is told as gone
        names = {self._name(key) for key in keys}
        self._left -= names
        self._presence.follow(names)

    def ended(self, keys: Iterable[bytes], done: Iterable[bytes]) -> None:
        """A copy of `keys` has ended; those of `done` are in the store."""
        self._hear()
        came = {self._name(key): key for key in done}
        new = [name for name in came if name not in self._told and name not in self._left]
        self._told.update((name, came[name]) for name in new)
        self._say([came[name] for name in new], removed=False)
        others = {self._name(key) for key in keys} - self._told.keys()
        self._left -= others
        self._presence.unfollow(others)
        while len(self._told) > self._most_chunks:
            name, key = self._told.popitem(last=False)
            self._presence.unfollow([name])
            self._say([key], removed=True)

    def forget(self) -> None:
        """What was told is gone; from now on chunks have other names."""
        self._say(list(self._told.values()), removed=True)
        self._presence.unfollow(self._told)
        self._told.clear()
        self._left.clear()

    def take(self) -> list[OffloadingEvent]:
        """What came and went since this was last called."""
        self._hear()
        ready, self._ready = self._ready, []
        return ready

    def _hear(self) -> None:
        gone = self._presence.gone()
        self._left |= gone - self._told.keys()
        self._say([self._told.pop(name) for name in gone & self._told.keys()], removed=True)

    def _say(self, keys: list[bytes], *, removed: bool) -> None:
        if keys:
            event = OffloadingEvent(keys, Medium.STORAGE, removed, locality=Locality.LOCAL, ownership=OWNER, removal_expected=not removed)
            self._ready.append(event)
