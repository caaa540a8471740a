"""For how long a store in trouble is left alone, where every request would otherwise wait for the same answer."""

from __future__ import annotations

import logging
import time

from kvstore import errors

AWAY_S = 2.0  # seconds for which a store that is away is not asked again: one that is started again is back soon
HUNG_S = 30.0  # seconds likewise, for one that did not answer in time: the next question would cost ten seconds again
SAID_S = 60.0  # seconds until a warning of the same kind is logged again: what fails with every request would fill the log
# What a store may be in trouble with, or too small for; the work goes on without it. Other errors are the caller's, or ours.
TROUBLE = (errors.EnvironmentFault, errors.SessionEnded, errors.StaleEpoch, errors.LimitExceeded)


class Warnings:
    """A log in which each kind of warning appears once in a while. Any thread may call: at worst two say it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said_at: dict[tuple[str, type[Exception]], float] = {}

    def say(self, what: str, error: Exception) -> bool:
        """Log "what: error", unless something of this error's class went wrong with the same a moment ago; whether it was logged."""
        now = time.monotonic()
        if now - self._said_at.get((what, type(error)), -SAID_S) < SAID_S:
            return False
        self._said_at[what, type(error)] = now
        self._log.warning("%s: %s: %s", what, type(error).__name__, error)
        return True


class Patience:
    """What one user of a store knows of its trouble. Any thread may call: at worst two ask where one would do."""

    def __init__(self, log: logging.Logger) -> None:
        self._warnings = Warnings(log)
        self._until = 0.0

    def check(self) -> None:
        """Raise Unavailable where the store was in trouble a moment ago."""
        if time.monotonic() < self._until:
            raise errors.Unavailable("the store was in trouble a moment ago, and is not asked again yet; going on without it")

    def excuse(self, error: errors.KVStoreError) -> str:
        """Note what it is in trouble with, and say it. Having no room, or a bad block, is no reason to leave it alone."""
        now = time.monotonic()
        if now >= self._until and not isinstance(error, (errors.ResourceExhausted, errors.Corruption)):
            self._until = now + (HUNG_S if isinstance(error, errors.DeadlineExceeded) else AWAY_S)
            self._warnings.say("going on without the store", error)
        return f"{type(error).__name__}: {error}"
