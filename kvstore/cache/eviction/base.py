"""The seam of eviction policies: they rank leaves, and nothing else. What may be evicted at all is decided elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.index import Index
from kvstore.cache.messages import NamespaceSpec
from kvstore.cache.slots import SlotIds, SlotTable

FIRST_IN_LINE = 0  # a rank below any that use can give: blocks that nobody can reach any more
LINE_BITS = 56  # bits: a rank's upper part says in which of its policy's lines the slot stands
_ONE_LINE = (0,)  # what `order` answers for most


class Policy(Protocol):
    """One tier's memory of use. Ranks are integers below 2^60; the lowest of a line goes first.

    Most policies have one line. One with several says, at each eviction, which of them is asked first.
    """

    lines: int = 1
    follows_chains: bool = False  # a rank is all there is to it: several evictions may be carried out as one

    def inserted(self, slot: int) -> None:
        """A block was put into this slot. Its row names the slot by now, and the slot its row."""

    def inserted_many(self, slots: NDArray[np.int32]) -> None:
        """`inserted` for many, in the order of their chain."""

    def used(self, slot: int) -> None:
        """Somebody asked for the block in this slot."""

    def used_many(self, slots: NDArray[np.int32]) -> None:
        """`used` for many, in the order of their chain."""

    def left(self, slot: int) -> None:
        """The block is about to leave this slot; the slot still names its row."""
        return

    def first_in_line(self, slot: int) -> None:
        """This block is worth nothing now."""

    def advance(self) -> None:
        """A new operation begins; later uses are later than those of the one before."""

    def order(self) -> Sequence[int]:
        """The lines in the order in which they are to be asked for the next victim."""
        return _ONE_LINE

    def spares(self, slot: int) -> bool:
        """Whether this slot, whose turn it is, gets another chance. If so, its rank has risen; each slot is spared a few times at most."""
        return False

    def rank(self, slot: int) -> int:
        """The slot's place in line."""

    def ranks(self, slots: SlotIds | slice) -> NDArray[np.int64]:
        """`rank` for many, or a slice of all. [n]"""


Namespaces = Sequence[NamespaceSpec | None]  # by id, as they are opened
PolicyMaker = Callable[[Index, SlotTable, Namespaces], Policy]
