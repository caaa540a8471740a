"""One pass over the slots of a size class, a stretch at a time, for the evictable ones that come next in a line.

Between two stretches the cache goes on. What becomes evictable behind the survey, or changes its rank, is noted, and all that was found is
looked at again at the end. So a tier of ten million slots is surveyed without anybody waiting for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.slots import SlotIds

Ranks = NDArray[np.int64]
Look = Callable[[SlotIds | slice], tuple[SlotIds, Ranks]]

STRETCH_SLOTS = 16_384  # slots looked at in one step: some 200 us
RANGE_SLOTS = 256  # slots: what looking at a range by itself costs beside its own
EVERY_RANK = (1 << 62) - 1  # limit: beyond all ranks, which are below 2^60, and 2^61 when pinned


class Survey:
    """Finds the lowest ranks above `floor`: about `keep` of them, and all up to `limit`, which is EVERY_RANK when there are fewer."""

    def __init__(self, ranges: Iterable[tuple[int, int]], look: Look, floor: int, keep: int) -> None:
        """ranges   (first slot, count) of each extent of the class
        look     which of some slots (a slice: of these) are evictable and in this line: (slots, ranks)
        """
        self.limit = EVERY_RANK
        self._floor, self._keep, self._look = floor, keep, look
        self._ahead = deque(_stretches(ranges))
        self.steps = len(self._ahead)
        self._slots: list[SlotIds] = []
        self._ranks: list[Ranks] = []
        self._found = 0
        self._noted: list[int] = []

    @property
    def done(self) -> bool:
        """Whether every slot was come by."""
        return not self._ahead

    def step(self) -> None:
        """Look at the next stretch."""
        for first, count in self._ahead.popleft():
            self._add(*self._look(slice(first, first + count)))

    def note(self, slot: int, rank: int) -> None:
        """A slot may have become evictable, or has this rank now."""
        if self._floor < rank <= self.limit:
            self._noted.append(slot)
            if len(self._noted) > STRETCH_SLOTS:
                self._look_at_noted()

    def finish(self) -> tuple[SlotIds, Ranks]:
        """What was found, as it is now: distinct evictable slots with ranks above the floor and up to `limit`."""
        self._look_at_noted()
        found = np.unique(np.concatenate([np.zeros(0, np.int32), *self._slots]))
        self._slots, self._ranks, self._found = [], [], 0
        self._add(*self._look(found))
        return self._joined()

    def _look_at_noted(self) -> None:
        noted = np.unique(np.array(self._noted, np.int32))
        self._noted = []
        self._add(*self._look(noted))

    def _add(self, slots: SlotIds, ranks: Ranks) -> None:
        inside = (ranks > self._floor) & (ranks <= self.limit)
        self._slots.append(slots[inside])
        self._ranks.append(ranks[inside])
        self._found += len(self._slots[-1])
        if self._found > 2 * self._keep:
            self._cut()

    def _cut(self) -> None:
        """Keep the lowest. Where very many share the last rank they are left for the next survey, unless there is no lower one."""
        slots, ranks = self._joined()
        last = int(np.partition(ranks, self._keep)[self._keep])
        lower = ranks < last
        self.limit = last - 1 if lower.any() else last
        within = lower if lower.any() else ranks == last
        self._slots, self._ranks, self._found = [slots[within]], [ranks[within]], int(np.count_nonzero(within))

    def _joined(self) -> tuple[SlotIds, Ranks]:
        return np.concatenate([np.zeros(0, np.int32), *self._slots]), np.concatenate([np.zeros(0, np.int64), *self._ranks])


def _stretches(ranges: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The ranges cut and joined into stretches of about STRETCH_SLOTS."""
    stretch: list[tuple[int, int]] = []
    room = STRETCH_SLOTS
    for first, count in _joined_ranges(ranges):
        while count:
            taken = min(count, room)
            stretch.append((first, taken))
            first, count, room = first + taken, count - taken, room - taken - RANGE_SLOTS
            if room <= 0:
                yield stretch
                stretch, room = [], STRETCH_SLOTS
    if stretch:
        yield stretch


def _joined_ranges(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The ranges in order, neighbours as one."""
    begin = end = 0
    for first, count in sorted(ranges):
        if first != end:
            yield begin, end - begin
            begin = first
        end = first + count
    yield begin, end - begin
