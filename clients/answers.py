"""What operations on a session's stream answer, as values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.proto import kvstore_pb2 as pb


@dataclass(frozen=True)
class Slotted:
    """To Reserve, Commit and Claim: parallel arrays, one row a block."""

    outcomes: NDArray[np.uint8]
    units: NDArray[np.uint32]
    generations: NDArray[np.uint32]


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
            slots = reply.slots
            return Slotted(
                np.frombuffer(slots.outcomes, np.uint8), np.frombuffer(slots.units, "<u4"), np.frombuffer(slots.generations, "<u4")
            )
        case "done":
            return Finished(reply.done.count)
        case "error":
            return Failed(errors.from_code(reply.error.code, reply.error.text))
        case _:
            return Failed(errors.InternalFault("the daemon sent an empty answer"))
