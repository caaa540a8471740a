"""What a lease or a put has of the store until it ends. Owned by the caller's thread or task."""

from __future__ import annotations

from kvstore.clients.gpus import MappedPool
from kvstore.clients.handles import Attached


class Hold:
    """What a lease or a put holds of a session, and of a GPU's pool; taken once, and given back once, however often that is asked."""

    def __init__(self, attached: Attached, pool: MappedPool | None) -> None:
        """`pool`: None for blocks in host memory alone."""
        self.attached, self.pool = attached, pool
        self.held = False
        self._in_pool = False

    def take(self) -> None:
        """Hold both. Raises Unavailable where the pool is mapped no more."""
        self.held = True
        if self.pool is not None:
            self.pool.hold()
            self._in_pool = True
        self.attached.hold_for(self)

    def drop(self) -> None:
        """Give back what was taken."""
        self.held = False
        in_pool, self._in_pool = self._in_pool, False
        if in_pool and self.pool is not None:
            self.pool.drop()
        self.attached.drop_for(self)
