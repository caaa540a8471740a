"""The seam of eviction policies: they rank leaves, and nothing else. What may be evicted at all is decided elsewhere."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FIRST_IN_LINE = 0  # a rank below any that use can give: blocks that nobody can reach any more


class Policy(Protocol):
    """One tier's memory of use. Ranks are integers below 2^60; the lowest goes first."""

    def used(self, slot: int) -> None:
        """A block was put into this slot, or somebody asked for it."""

    def used_many(self, slots: NDArray[np.int32]) -> None:
        """`used` for many, in the order of their chain."""

    def first_in_line(self, slot: int) -> None:
        """This block is worth nothing now."""

    def advance(self) -> None:
        """A new operation begins; later uses are later than those of the one before."""

    def rank(self, slot: int) -> int:
        """The slot's place in line."""

    def ranks(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """`rank` for many. [n]"""
