"""What the log says of wrong bytes: a line a block with what to do, and where there are very many, how many more there were."""

from __future__ import annotations

import logging

from kvstore.cache.messages import Corrupted, Tier

LINES = 32  # in a window of time; a disk that goes bad, or a client that means harm, has thousands
WINDOW_S = 10.0  # seconds: a few lines a second, in which everything else is still seen
STORY_EVENTS = 8  # of a block, the last ones, in its line

log = logging.getLogger(__name__)


class CorruptionLog:
    """Pure but for the log: the time is passed in."""

    def __init__(self) -> None:
        self._until = float("-inf")
        self._lines = self._left_out = 0

    def tell(self, corrupted: Corrupted, now: float) -> None:
        """Log a block, or count it where there were many lately."""
        self.look(now)
        if now >= self._until:
            self._until, self._lines = now + WINDOW_S, 0
        self._lines += 1
        if self._lines > LINES:
            self._left_out += 1
            return
        log.error(
            "corrupt block %s in %s at unit %d, found by %s: removed everywhere; %s",
            corrupted.hash.hex(),
            corrupted.tier.name.lower(),
            corrupted.units,
            corrupted.found_by,
            _advice(corrupted),
            extra={"namespace": corrupted.namespace, "story": "; ".join(corrupted.story.splitlines()[-STORY_EVENTS:])},
        )

    def look(self, now: float) -> None:
        """Say how many were left out, once their window is over. Now and then."""
        if self._left_out and now >= self._until:
            log.error("%d more corrupt blocks were removed in %g s; corrupt_blocks counts them all", self._left_out, WINDOW_S)
            self._left_out = 0


def _advice(corrupted: Corrupted) -> str:
    if corrupted.tier is Tier.DRAM:
        if not corrupted.quarantine:
            return "a client wrote other bytes than its checksum says"
        return "its slot is in quarantine: a process wrote into memory that was not its own, or the memory is bad"
    if not corrupted.quarantine:
        return "the last stop was not clean, so its write may have been cut short"
    return "its slot is in quarantine; check the disk"
