"""What `put` gives: the blocks of a sequence that are not stored yet, to be filled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from kvstore import errors
from kvstore.clients.arena import Bytes
from kvstore.clients.copying import Buffer, address, checked, copy_blocks
from kvstore.clients.gpus import MappedPool, place_of
from kvstore.clients.handles import EXISTS, OUTCOME_NAMES, SLOT, STORED, Attached
from kvstore.clients.hbm import DeviceBytes
from kvstore.clients.hold import Hold
from kvstore.clients.pools import number_of
from kvstore.geometry import UNIT_BYTES
from kvstore.hashing import HASH_BYTES
from kvstore.proto import kvstore_pb2 as pb


class Put:
    """Made by `put`; the filled blocks are committed when its `with` block ends.

    `blocks` are those to write, in order; blocks that are stored already, or that another session is writing, are not among them.
    `outcomes`, one code a block of the sequence (`names` has them in words), are final after the `with` block.
    """

    def __init__(
        self, hashes: bytes, parent: bytes, outcomes: NDArray[np.uint8], block_bytes: int, pool: MappedPool | None = None
    ) -> None:
        """outcomes [n]: SLOT marks the blocks to write. They are gathered in memory of this process until `give_slots` is called.

        pool   whose slots will be given, held for this put; None: of host memory
        """
        self.pool = pool
        self.hashes = hashes
        self.outcomes = outcomes
        self.block_bytes = block_bytes
        self.hold: Hold | None = None  # None: the bytes go over gRPC
        self.releases: list[pb.Op] = []  # of the leases that its blocks became
        self.reservation = 0
        self.units = self.generations = np.zeros(0, np.uint32)  # [n], by index, where there is a slot
        self.filled = bytearray(len(outcomes))  # by index; 1: complete
        self.blocks = PutBlocks(self, np.flatnonzero(outcomes == SLOT))
        self.sealed = False
        self._parent = parent
        self._handed_out: dict[int, Bytes] = {}  # by the array's id: a view is asked for again and again

    def give_slots(self, hold: Hold, reservation: int, units: NDArray[np.uint32], generations: NDArray[np.uint32]) -> None:
        """The blocks are to be written in place."""
        self.hold, self.reservation, self.units, self.generations = hold, reservation, units, generations

    @property
    def attached(self) -> Attached | None:
        """The session that its slots are of."""
        return self.hold.attached if self.hold is not None else None

    @property
    def pool_number(self) -> int:
        """Where the slots are, as operations say it."""
        return number_of(self.pool.pool if self.pool is not None else None)

    @property
    def names(self) -> tuple[str, ...]:
        """The outcome of each block by its name."""
        return tuple(OUTCOME_NAMES[outcome] for outcome in self.outcomes)

    @property
    def stored(self) -> int:
        """Leading blocks that are in the store now, whoever wrote them."""
        present = (self.outcomes == STORED) | (self.outcomes == EXISTS)
        return int(len(present) if present.all() else np.argmin(present))

    def write_all(self, sources: Sequence[Buffer]) -> None:
        """Copy every block that is to be written, and mark them done. Long copies are shared by a few threads.

        sources   one buffer of a block's size for each block of the sequence; those of blocks that need not be written are not touched
        """
        self.check_open()
        if len(sources) != len(self.outcomes):
            raise errors.InvalidArgument(f"{len(sources)} sources for {len(self.outcomes)} blocks; give one for each block")
        indices = self.blocks.indices.tolist()
        if self.pool is not None:
            self.write_in_pool(self.pool, [(index, sources[index]) for index in indices])
            return
        data = [checked(sources[index], self.block_bytes, "a source", writable=False) for index in indices]
        if self.attached is None:
            for block, source in zip(self.blocks, data, strict=True):
                np.copyto(block.memory(), source)
        else:
            arena, units = self.attached.arena, self.units[self.blocks.indices]
            firsts = units.tolist()

            def warm(which: int, start: int, stop: int) -> None:
                arena.warm(firsts[which], start, stop, write=True)

            targets = arena.addresses(units, self.block_bytes, write=True)
            copy_blocks(targets, [address(each) for each in data], self.block_bytes, warm)
        for index in indices:
            self.filled[index] = 1

    def write_in_pool(self, pool: MappedPool, sources: Sequence[tuple[int, Any]]) -> None:
        """Copy blocks, each (index, source), to the GPU, and mark them done. Sources may lie in its memory too, filled already."""
        size_bytes = self.block_bytes
        places = [place_of(source, size_bytes, "a source", writable=False) for _, source in sources]
        targets = [self.device_view(index).address for index, _ in sources]
        pool.imported.copy([(to, of, size_bytes) for to, of in zip(targets, places, strict=True)])
        for index, _ in sources:
            self.filled[index] = 1

    def device_view(self, index: int) -> DeviceBytes:
        """Block `index` in the GPU's memory. Raises InvalidArgument where it is in the host's."""
        self.check_open()
        if self.pool is None:
            raise errors.InvalidArgument("this block is in host memory: fill its view; or put with pool= for one in a GPU's")
        return self.pool.imported.view(int(self.units[index]) * UNIT_BYTES, self.block_bytes)

    def check_open(self) -> None:
        """Raise SessionEnded where the `with` block has ended: what is written then would change bytes that others read."""
        if self.sealed:
            raise errors.SessionEnded("the put has ended; write its blocks inside the with block")

    def committable(self) -> NDArray[np.intp]:
        """The filled blocks before the first unfilled one, by index: what follows a hole could never be found."""
        filled = np.frombuffer(self.filled, np.uint8)[self.blocks.indices]
        return self.blocks.indices[: len(filled) if filled.all() else int(np.argmin(filled))]

    def seal(self) -> None:
        """Nothing may be written any more."""
        self.sealed = True
        for view in self._handed_out.values():
            view.flags.writeable = False

    def handed_out(self, view: Bytes) -> None:
        """The caller may write into this from now on."""
        view.flags.writeable = not self.sealed
        self._handed_out[id(view)] = view

    def hash_at(self, index: int) -> bytes:
        """The hash of block `index`."""
        return self.hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]

    def parent_of(self, index: int) -> bytes:
        """The hash before block `index`."""
        return self.hash_at(index - 1) if index else self._parent


class PutBlock:
    """One block to fill: its place in the sequence, its hash, and where its bytes go."""

    __slots__ = ("_put", "_view", "index")

    def __init__(self, put: Put, index: int) -> None:
        self.index = index
        self._put = put
        self._view: Bytes | None = None

    @property
    def hash(self) -> bytes:
        """The block's hash, 32 bytes."""
        return self._put.hash_at(self.index)

    @property
    def device_view(self) -> DeviceBytes:
        """With a `pool`: the block's bytes in the GPU's memory, to be written here, as CuPy and torch take them without a copy.

        What writes them must have run before `done` is said, and before the `with` block ends, however it does.
        """
        return self._put.device_view(self.index)

    @property
    def view(self) -> Bytes:
        """The block's bytes, to be written here; read-only once the `with` block has ended. With a `pool` see `device_view`.

        What was derived from it, a slice or a tensor, cannot be taken back: writing through it later changes a published block.
        """
        self.warm(0, self._put.block_bytes)
        view = self.memory()
        self._put.handed_out(view)
        return view

    @property
    def filled(self) -> bool:
        """Whether the bytes are complete."""
        return bool(self._put.filled[self.index])

    @filled.setter
    def filled(self, value: bool) -> None:
        """Say whether they are."""
        self._put.filled[self.index] = value

    def write(self, source: Buffer) -> None:
        """Copy the whole block from `source` and mark it done."""
        self._put.check_open()
        if self._put.pool is not None:
            self._put.write_in_pool(self._put.pool, [(self.index, source)])
            return
        self.warm(0, self._put.block_bytes)
        np.copyto(self.memory(), checked(source, self._put.block_bytes, "the source", writable=False))
        self.done()

    def done(self) -> None:
        """The bytes are complete: commit this block when the `with` block ends."""
        self._put.filled[self.index] = 1

    def memory(self) -> Bytes:
        """`view`, whose pages this process may not have mapped yet. Of each block one thread at a time may ask."""
        if self._view is None:
            put = self._put
            if put.pool is not None:
                raise errors.InvalidArgument("this block is in a GPU's memory: fill its device_view, or use write")
            arena = put.attached.arena if put.attached is not None else None
            size = put.block_bytes
            self._view = np.zeros(size, np.uint8) if arena is None else arena.writable_view(int(put.units[self.index]), size)
        return self._view

    def warm(self, start: int, stop: int) -> None:
        """Have these bytes mapped before they are written: a fault a page costs several times as much. Any thread may call."""
        put = self._put
        if put.attached is not None and put.pool is None and not put.sealed:
            put.attached.arena.warm(int(put.units[self.index]), start, stop, write=True)


class PutBlocks(Sequence[PutBlock]):
    """The blocks to write, each made when it is asked for."""

    def __init__(self, put: Put, indices: NDArray[np.intp]) -> None:
        self.indices = indices
        self._put = put
        self._made: dict[int, PutBlock] = {}

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, which: int) -> PutBlock: ...
    @overload
    def __getitem__(self, which: slice) -> list[PutBlock]: ...
    def __getitem__(self, which: int | slice) -> PutBlock | list[PutBlock]:
        if isinstance(which, slice):
            return [self[each] for each in range(*which.indices(len(self)))]
        index = int(self.indices[which])
        return self._made.get(index) or self._made.setdefault(index, PutBlock(self._put, index))
