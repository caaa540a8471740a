"""What `get` gives: the right to read the leading blocks of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.clients.arena import Arena, Bytes
from kvstore.clients.copying import Buffer, address, checked, copy_blocks
from kvstore.clients.handles import Attached

_NO_BYTES = np.zeros(0, np.uint8)


class Views(Sequence[Bytes]):
    """Blocks in the arena, each an array of bytes that is made when it is asked for: a long prompt has thousands."""

    def __init__(self, arena: Arena, units: NDArray[np.uint32], generations: NDArray[np.uint32], size_bytes: int) -> None:
        """units, generations [n]: the slots; generation 0 marks a block that the namespace does not keep, and that has no bytes."""
        self._arena, self._units, self._generations, self._size_bytes = arena, units, generations, size_bytes

    def __len__(self) -> int:
        return len(self._units)

    @overload
    def __getitem__(self, which: int) -> Bytes: ...
    @overload
    def __getitem__(self, which: slice) -> list[Bytes]: ...
    def __getitem__(self, which: int | slice) -> Bytes | list[Bytes]:
        if isinstance(which, slice):
            return [self[each] for each in range(*which.indices(len(self)))]
        if not self._generations[which]:
            return _NO_BYTES
        return self._arena.view(int(self._units[which]), self._size_bytes)

    def copy_into(self, targets: Sequence[Buffer]) -> None:
        """Copy the leading blocks; those that the namespace does not keep leave their targets alone."""
        kept = np.flatnonzero(self._generations[: len(targets)])
        into = [checked(targets[which], self._size_bytes, "a target", writable=True) for which in kept.tolist()]
        units = self._units[kept].tolist()

        def warm(which: int, start: int, stop: int) -> None:
            self._arena.warm(units[which], start, stop, write=False)

        sources = self._arena.addresses(self._units[kept], self._size_bytes, write=False)
        copy_blocks([address(each) for each in into], sources, self._size_bytes, warm)


class Lease:
    """The right to read the leading blocks of a sequence. Made by `get`; ends with its `with` block."""

    def __init__(self, views: Sequence[Bytes], attached: Attached | None = None, lease: int = 0) -> None:
        self._views: Sequence[Bytes] = views
        self._closed = False
        self.attached = attached  # None: the bytes came over gRPC and are the caller's own copies
        self.lease = lease

    @property
    def blocks(self) -> int:
        """How many leading blocks are held."""
        return len(self._views)

    @property
    def views(self) -> Sequence[Bytes]:
        """One read-only array of bytes a block, in place. Valid inside the `with` block only.

        Of no bytes where the namespace does not keep the block: it lies before the window, or is not the last state.
        Raises SessionEnded where the lease is over, StaleEpoch where the daemon was restarted.
        """
        self.check()
        return self._views

    def copy_into(self, targets: Sequence[Buffer]) -> int:
        """Copy the leading blocks into `targets`, one writable buffer of a block's size each. Returns how many were copied.

        Long copies are shared by a few threads. Targets of blocks that the namespace does not keep are left as they are, and count.
        """
        views = self.views
        if isinstance(views, Views):
            views.copy_into(targets)
        else:
            for view, target in zip(views, targets, strict=False):
                if len(view):
                    np.copyto(checked(target, len(view), "a target", writable=True), view)
        self.check()
        return min(len(views), len(targets))

    def check(self) -> None:
        """Raise SessionEnded or StaleEpoch where the lease is no longer good."""
        if self._closed:
            raise errors.SessionEnded("the lease was given back; use its views inside the with block")
        if self.attached is not None:
            self.attached.check()

    def close(self) -> bool:
        """Mark it given back; True the first time."""
        first, self._closed, self._views = not self._closed, True, ()
        return first
