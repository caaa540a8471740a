"""Whether a client may be used: in the process that made it, until it is closed. Any thread may ask, and no lock is taken."""

from __future__ import annotations

import os

from kvstore.errors import InvalidArgument, SessionEnded


class Life:
    """Of one client. A child of `fork` has copies of its locks, maps and connections that belong to the parent."""

    def __init__(self) -> None:
        self.closed = False
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """This is a child of the process that made the client: nothing of it may be touched here."""
        return self._pid != os.getpid()

    def check(self) -> None:
        """Raise InvalidArgument in a child process, SessionEnded once the client is closed."""
        self.check_process()
        if self.closed:
            raise self.ended()

    def check_process(self) -> None:
        """Raise InvalidArgument in a child process."""
        if self._pid != os.getpid():
            raise InvalidArgument("this client was made before a fork; make a new one in this process")

    def ended(self) -> SessionEnded:
        """What every call on a closed client raises, and every call that the closing broke off."""
        return SessionEnded("the client was closed; make a new one")
