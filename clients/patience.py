"""For how long a store in trouble is left alone, where every request would otherwise wait for the same answer."""

from __future__ import annotations

import logging
import time

from kvstore import errors

AWAY_S = 2.0  # seconds for which a store that is away is not asked again: one that is started again is back soon
HUNG_S = 30.0  # seconds likewise, for one that did not answer in time: the next question would cost ten seconds again
# What a store may be in trouble with; the work goes on without it. Other errors are the caller's, or ours.
TROUBLE = (errors.EnvironmentFault, errors.SessionEnded, errors.StaleEpoch)


class Patience:
    """What one user of a store knows of its trouble. Any thread may call: at worst two ask where one would do."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._until = 0.0

    def check(self) -> None:
        """Raise Unavailable where the store was in trouble a moment ago."""
        if time.monotonic() < self._until:
            raise errors.Unavailable("the store was in trouble a moment ago, and is not asked again yet; going on without it")

    def excuse(self, error: errors.KVStoreError) -> str:
        """Note what it is in trouble with, and say it. Having no room, or a bad block, is no reason to leave it alone."""
        fault = f"{type(error).__name__}: {error}"
        now = time.monotonic()
        if now >= self._until and not isinstance(error, (errors.ResourceExhausted, errors.Corruption)):
            self._until = now + (HUNG_S if isinstance(error, errors.DeadlineExceeded) else AWAY_S)
            self._log.warning("going on without the store: %s", fault)
        return fault
