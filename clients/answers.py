"""What operations on a session's stream answer, as values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.proto import kvstore_pb2 as pb


class Slotted:
    """To Reserve, Commit and Claim: parallel arrays, one row a block, made when they are asked for."""

    __slots__ = ("_reply",)

    def __init__(self, reply: pb.SlotReply) -> None:
        self._reply = reply

    @property
    def outcomes(self) -> NDArray[np.uint8]:
        """What became of each block."""
        return np.frombuffer(self._reply.outcomes, np.uint8)

    @property
    def units(self) -> NDArray[np.uint32]:
        """Where its slot is; 0 for none."""
        return np.frombuffer(self._reply.units, "<u4")

    @property
    def generations(self) -> NDArray[np.uint32]:
        """Which tenure of the slot."""
        return np.frombuffer(self._reply.generations, "<u4")


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
