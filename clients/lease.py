"""What `get` gives: the right to read the leading blocks of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.clients.arena import Arena, Bytes
from kvstore.clients.copying import Buffer, address, checked, copy_blocks
from kvstore.clients.gpus import MappedPool, place_of
from kvstore.clients.handles import Attached
from kvstore.clients.hbm import DeviceBytes
from kvstore.clients.hold import Hold
from kvstore.proto import kvstore_pb2 as pb

_NO_BYTES = np.zeros(0, np.uint8)


class Views(Sequence[Bytes]):
    """Blocks in the arena, each an array of bytes that is made when it is asked for: a long prompt has thousands."""

    def __init__(self, arena: Arena, units: NDArray[np.uint32], generations: NDArray[np.uint32], size_bytes: int) -> None:
        """units, generations [n]: the slots; generation 0 marks a block that the namespace does not keep, and that has no bytes."""
        self._arena, self._units, self._generations, self.size_bytes = arena, units, generations, size_bytes

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
        return self._arena.view(int(self._units[which]), self.size_bytes)

    def places(self) -> list[int]:
        """Where each block begins in this process's memory; 0 where it has no bytes."""
        found = self._arena.addresses(self._units, self.size_bytes, write=False)
        return [place if kept else 0 for place, kept in zip(found, self._generations.tolist(), strict=True)]

    def copy_into(self, targets: Sequence[Buffer]) -> None:
        """Copy the leading blocks; those that the namespace does not keep leave their targets alone."""
        kept = np.flatnonzero(self._generations[: len(targets)])
        into = [checked(targets[which], self.size_bytes, "a target", writable=True) for which in kept.tolist()]
        units = self._units[kept].tolist()

        def warm(which: int, start: int, stop: int) -> None:
            self._arena.warm(units[which], start, stop, write=False)

        sources = self._arena.addresses(self._units[kept], self.size_bytes, write=False)
        copy_blocks([address(each) for each in into], sources, self.size_bytes, warm)


class Lease:
    """The right to read the leading blocks of a sequence. Made by `get`; ends with its `with` block.

    With a `pool` the first blocks are those in the GPU's memory, `device_views`; those that follow are in host memory, `views`.
    """

    def __init__(
        self,
        views: Sequence[Bytes],
        hold: Hold | None = None,
        leases: Sequence[pb.Op] = (),
        device_views: Sequence[DeviceBytes] = (),
    ) -> None:
        """hold   None: the bytes came over gRPC and are the caller's own copies;  leases  the releases that end it"""
        self._views: Sequence[Bytes] = views
        self._device_views: Sequence[DeviceBytes] = device_views
        self._closed = False
        self.hold = hold
        self.leases = list(leases)

    @property
    def attached(self) -> Attached | None:
        """The session that it hangs on."""
        return self.hold.attached if self.hold is not None else None

    @property
    def pool(self) -> MappedPool | None:
        """The pool that its first blocks are in."""
        return self.hold.pool if self.hold is not None else None

    @property
    def blocks(self) -> int:
        """How many leading blocks are held."""
        return len(self._device_views) + len(self._views)

    @property
    def views(self) -> Sequence[Bytes]:
        """One read-only array of bytes a block in host memory, in place. Valid inside the `with` block only.

        Of no bytes where the namespace does not keep the block: it lies before the window, or is not the last state.
        Raises SessionEnded where the lease is over, StaleEpoch where the daemon was restarted.
        """
        self.check()
        return self._views

    @property
    def device_views(self) -> Sequence[DeviceBytes]:
        """The leading blocks that are in the GPU's memory, in place: what CuPy and torch take without a copy. As `views` otherwise.

        They must not be written, and what reads them must have run when the `with` block ends.
        """
        self.check()
        return self._device_views

    def copy_into(self, targets: Sequence[Buffer]) -> int:
        """Copy the leading blocks into `targets`, one writable buffer of a block's size each. Returns how many were copied.

        Long copies are shared by a few threads. Targets of blocks that the namespace does not keep are left as they are, and count.
        With a `pool` targets may be arrays in its GPU's memory too.
        """
        views = self.views
        if self.pool is not None and isinstance(views, Views):
            self._copy_by_driver(self.pool, views, targets)
        elif isinstance(views, Views):
            views.copy_into(targets)
        else:
            for view, target in zip(views, targets, strict=False):
                if len(view):
                    np.copyto(checked(target, len(view), "a target", writable=True), view)
        self.check()
        return min(self.blocks, len(targets))

    def _copy_by_driver(self, pool: MappedPool, views: Views, targets: Sequence[Buffer]) -> None:
        places = [*(each.address for each in self._device_views), *views.places()]
        pairs = [(target, of) for target, of in zip(targets, places, strict=False) if of]
        size_bytes = views.size_bytes
        pool.imported.copy([(place_of(target, size_bytes, "a target", writable=True), of, size_bytes) for target, of in pairs])

    def check(self) -> None:
        """Raise SessionEnded or StaleEpoch where the lease is no longer good."""
        if self._closed:
            raise errors.SessionEnded("the lease was given back; use its views inside the with block")
        if self.attached is not None:
            self.attached.check()

    def close(self) -> None:
        """Mark it given back."""
        self._closed, self._views, self._device_views = True, (), ()
