"""What operations on a session's stream answer, as values."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.proto import kvstore_pb2 as pb


class Slotted:
    """To Reserve, Commit and Claim: parallel arrays, one row a block, made when they are asked for."""

    __slots__ = ("_place", "_reply")

    def __init__(self, reply: pb.SlotReply | pb.EachReply, place: int | None = None) -> None:
        """`place`: of the operation, about one block, among those that were answered together."""
        self._reply, self._place = reply, place

    @property
    def outcomes(self) -> NDArray[np.uint8]:
        """What became of each block."""
        return np.frombuffer(self._part(self._reply.outcomes, 1), np.uint8)

    @property
    def units(self) -> NDArray[np.uint32]:
        """Where its slot is; 0 for none."""
        return np.frombuffer(self._part(self._reply.units, 4), "<u4")

    @property
    def generations(self) -> NDArray[np.uint32]:
        """Which tenure of the slot."""
        return np.frombuffer(self._part(self._reply.generations, 4), "<u4")

    def _part(self, packed: bytes, size: int) -> bytes:
        return packed if self._place is None else packed[size * self._place : size * (self._place + 1)]


@dataclass(frozen=True)
class Expected:
    """To Acquire: so many blocks are on their way."""

    blocks: int
    reason: str
    tail_tokens: int = 0  # not 0: the last of them is a donor, of which so many tokens are usable


@dataclass(frozen=True)
class Finished:
    """To Abandon and Release."""

    count: int


@dataclass(frozen=True)
class Failed:
    """The operation did nothing."""

    error: errors.KVStoreError


Answer = Slotted | Expected | Finished | Failed


def read_answer(reply: pb.OpReply) -> Answer:
    """One reply of a batch."""
    match reply.WhichOneof("kind"):
        case "acquired":
            return Expected(reply.acquired.expected_blocks, reply.acquired.reason, reply.acquired.tail_tokens)
        case "slots":
            return Slotted(reply.slots)
        case "done":
            return Finished(reply.done.count)
        case "error":
            return Failed(errors.from_code(reply.error.code, reply.error.text))
        case _:
            return Failed(errors.InternalFault("the daemon sent an empty answer"))


_finished = functools.lru_cache(64)(Finished)  # counts: mostly one of a few


def read_answers(reply: pb.OpReply, count: int) -> Sequence[Answer]:
    """One reply of a batch to `count` operations that were sent packed."""
    if reply.WhichOneof("kind") != "each":
        return [read_answer(reply)] * count
    each, answers = reply.each, list[Answer]()
    if each.replies:
        answers += map(read_answer, each.replies)
    elif len(each.counts) == 4 * count:
        answers += map(_finished, struct.unpack(f"<{count}I", each.counts))
    else:
        answers += [Slotted(each, place) for place in range(len(each.outcomes))]
    if len(answers) != count:
        return [Failed(errors.InternalFault(f"the daemon sent {len(answers)} answers to {count} operations"))] * count
    return answers
