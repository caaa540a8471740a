"""What happened lately, per block: one ring for all, to explain a state that surprises. Bounded, and cheap to write."""

from __future__ import annotations

import numpy as np

RING_EVENTS = 16_384  # 32 bytes each: half a MiB; some minutes of a busy daemon

_EVENT = np.dtype([("number", "<u8"), ("word", "<u8"), ("what", "S8"), ("a", "<i4"), ("b", "<i4")])


class Story:
    """`tell` what happened to a block (known by the first word of its hash); `of` reads it back, oldest first."""

    def __init__(self) -> None:
        self._ring = np.zeros(RING_EVENTS, _EVENT)
        self._next = 0

    def tell(self, word: int, what: str, a: int = 0, b: int = 0) -> None:
        """`what` is at most 8 ASCII letters; `a` and `b` are mostly slots, transfers or sessions."""
        self._ring[self._next % RING_EVENTS] = (self._next, word, what.encode(), a, b)
        self._next += 1

    def tell_many(self, words: list[int], what: str, of: list[int], b: int = 0) -> None:
        """`tell` of many blocks, each with its `of` as `a`."""
        name = what.encode()
        for number, word, a in zip(range(self._next, self._next + len(words)), words, of, strict=True):
            self._ring[number % RING_EVENTS] = (number, word, name, a, b)
        self._next += len(words)

    def of(self, word: int) -> str:
        """One line an event."""
        mine = self._ring[self._ring["word"] == word]
        mine = mine[np.argsort(mine["number"])]
        return "\n".join(f"#{event['number']} {event['what'].decode()} {event['a']} {event['b']}" for event in mine)
