"""What happened lately, per block: one ring for all, to explain a state that surprises. Bounded, and cheap to write."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

RING_EVENTS = 16_384  # 36 bytes each: 576 KiB; some minutes of a busy daemon

NO_BLOCK = 0  # in the place of a block's word: what is told is about all of its namespace

_EVENT = np.dtype([("number", "<u8"), ("word", "<u8"), ("what", "S8"), ("a", "<i4"), ("b", "<i4"), ("namespace", "<i4")])
_PACKED = struct.Struct("<QQ8siii")  # an event as one; writing a row of the array takes twice as long


class Story:
    """`tell` what happened to a block of a namespace (known by the first word of its hash); `of` reads it back, oldest first."""

    def __init__(self) -> None:
        self._bytes = bytearray(RING_EVENTS * _EVENT.itemsize)
        self._ring = np.frombuffer(self._bytes, _EVENT)
        self._next = 0

    def tell(self, namespace: int, word: int, what: str, a: int = 0, b: int = 0) -> None:
        """`what` is at most 8 ASCII letters; `a` and `b` are mostly slots, transfers or sessions."""
        _PACKED.pack_into(self._bytes, self._next % RING_EVENTS * _PACKED.size, self._next, word, what.encode(), a, b, namespace)
        self._next += 1

    def tell_many(self, namespace: int, words: list[int], what: str, of: list[int], b: int = 0) -> None:
        """`tell` of many blocks of one namespace, each with its `of` as `a`."""
        name, pack_into = what.encode(), _PACKED.pack_into
        for number, word, a in zip(range(self._next, self._next + len(words)), words, of, strict=True):
            pack_into(self._bytes, number % RING_EVENTS * _PACKED.size, number, word, name, a, b, namespace)
        self._next += len(words)

    def of(self, word: int) -> str:
        """One line an event, of whichever namespace."""
        mine = self._ring[self._ring["word"] == word]
        mine = mine[np.argsort(mine["number"])]
        return "\n".join(f"#{event['number']} {event['what'].decode()} {event['a']} {event['b']}" for event in mine)

    def last(self, namespace: int, words: NDArray[np.uint64]) -> str:
        """What happened last to any of these blocks of a namespace; "" where nothing is known."""
        mine = self._ring[(self._ring["namespace"] == namespace) & np.isin(self._ring["word"], words)]
        return str(mine["what"][np.argmax(mine["number"])].decode()) if len(mine) else ""
