"""The daemon's book of sessions: their files beside the arena, and those that have ended while their processes may still live.

A session's process is gone when nobody holds the lock of any of its files. On the event loop; the kernel answers at once.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvstore import errors
from kvstore.cache.messages import Mark, Units
from kvstore.tiers.dram import DramTier
from kvstore.tiers.session_files import SessionFile

TOKEN_BYTES = 16  # a resume token: nobody guesses 128 bits


@dataclass
class Attached:
    """One session, from its Hello until its process is gone."""

    id: int
    tenant: str
    client: str
    token: bytes = field(default_factory=lambda: secrets.token_bytes(TOKEN_BYTES))
    files: list[SessionFile] = field(default_factory=list)  # the last one is its own, others are of the sessions that it resumed
    locked: bool = False
    ended: bool = False

    def process_gone(self) -> bool:
        """Nobody can touch the arena under this session any more."""
        return all(file.process_gone() for file in self.files)


class Sessions:
    """By id, and the survivors of earlier daemons."""

    def __init__(self, dram: DramTier) -> None:
        self._dram = dram
        self._ids = count(1)
        self._known: dict[int, Attached] = {}
        self.survivors: list[SessionFile] = []

    def __bool__(self) -> bool:
        """Some process may still have the arena mapped."""
        return bool(self.survivors) or any(session.files for session in self._known.values())

    def begin(self, tenant: str, client: str, *, maps_arena: bool) -> Attached:
        """A new session, with a file where its client maps the arena. Raises ResourceExhausted."""
        session = Attached(next(self._ids), tenant, client)
        if maps_arena:
            session.files.append(self._dram.create_session(session.id))
        self._known[session.id] = session
        return session

    def get(self, session: int) -> Attached | None:
        """The session, also when it has ended and its process is not known to be gone."""
        return self._known.get(session)

    def resumable(self, session: int, token: bytes, tenant: str) -> Attached:
        """The ended session whose holds a client may regain. Raises NotFound."""
        old = self._known.get(session)
        if old is None or not old.ended or old.tenant != tenant or not secrets.compare_digest(old.token, token):
            raise errors.NotFound(f"session {session} has no holds to regain with this token; attach without resume")
        return old

    def take_over(self, old: Attached, new: Attached) -> None:
        """The new session has the old one's holds. Its process still has the old lock: the old files count until `locked`."""
        new.files[:0] = old.files
        del self._known[old.id]

    def confirm_lock(self, session: Attached) -> None:
        """Check that the client holds the lock of its file. Raises InvalidArgument."""
        if session.files:
            if session.files[-1].process_gone():
                raise errors.InvalidArgument(
                    f"nobody holds the lock on {session.files[-1].path}; take an exclusive flock on it before Locked, on this machine"
                )
            for file in session.files[:-1]:
                file.remove()
            del session.files[:-1]
        session.locked = True

    def mark(self, mark: Mark) -> None:
        """Note what a process may touch. Raises ResourceExhausted; then nothing of it may be granted."""
        session = self._known.get(mark.session)
        if session is not None and session.files:
            session.files[-1].mark(mark.granted, mark.withdrawn)

    def forget(self, session: int) -> None:
        """The session's process is gone, or has unmapped the arena."""
        known = self._known.pop(session, None)
        if known is not None:
            for file in known.files:
                file.remove()

    def gone(self) -> list[int]:
        """Ended sessions whose processes are gone by now."""
        return [session.id for session in self._known.values() if session.ended and session.process_gone()]

    def survivors_gone(self) -> Units:
        """What survivors of earlier daemons had marked and none that is left has, for those gone by now; their files are removed."""
        gone = [file for file in self.survivors if file.process_gone()]
        if not gone:
            return np.zeros(0, np.uint32)
        self.survivors = [file for file in self.survivors if file not in gone]
        freed = np.concatenate([file.marked_units() for file in gone])
        for file in gone:
            file.remove()
        return np.setdiff1d(freed, np.concatenate([freed[:0], *(file.marked_units() for file in self.survivors)]))

    def close(self) -> None:
        """Leave every file for the next daemon."""
        for session in self._known.values():
            for file in session.files:
                file.close()
        for file in self.survivors:
            file.close()
