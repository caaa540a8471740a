"""The paged KV cache of a worker's running sequences, over a store of blocks.

A sequence leases the leading blocks that the store has, fills slots for the rest, and commits each block after the step that filled
it. What it was given it keeps until it is closed, whatever became of the store: leases and reservations stay mapped, a block that turned
out to exist stays where it was written. Once the store cannot be reached, further blocks go to this process's memory, uncommitted.

A fork shares all blocks of its origin, by reference count; the block that either writes to next is copied first.

    pull → open → (ensure → step → advance)* → close
"""

import contextlib
import itertools
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvstore.clients.blocks import Arrival, BlockStore, Tail
from kvstore.errors import EnvironmentFault, InvalidArgument, ResourceExhausted
from kvstore.hashing import HASH_BYTES, block_hashes
from kvstore.worker.attention import Step
from kvstore.worker.gpu.device import Gpu
from kvstore.worker.gpu.kernels import GpuKernels
from kvstore.worker.gpu.running import GpuRunner
from kvstore.worker.native import native_for
from kvstore.worker.pool import Place, Pool, slots_of
from kvstore.worker.pulls import Pulled, Pulls
from kvstore.worker.rows import CPU, ArenaRows, BlockTable, RowLayout, Scratch
from kvstore.worker.scheduler import ACQUIRE_TIMEOUT_S
from kvstore.worker.sequences import AnySequence
from kvstore.worker.spans import Span

REMEMBERED_BLOCKS = 1 << 16  # hashes of blocks that this worker has committed last: what is likely to be a hit


@dataclass(eq=False)
class Hold:
    """What one sequence, or several that share it, holds of the store: a lease, and the places that it filled under it."""

    lease: int
    places: list[Place] = field(default_factory=list)
    users: int = 1


class PagedCache:
    """Sequences over one store. One thread calls it; `close` ends what is left and leaves the store open.

    native    new tokens attend through the CPU kernels, where those serve them: faster, and not torch's last bits
    gpu       where the store's blocks lie, if not in the host's memory: the CUDA kernels attend there
    """

    def __init__(
        self, store: BlockStore, acquire_timeout_s: float = ACQUIRE_TIMEOUT_S, native: bool = False, gpu: Gpu | None = None
    ) -> None:
        self.store = store
        self.layout = RowLayout(store.geometry, CPU if gpu is None else gpu.device)
        self.native = GpuKernels(gpu, self.layout) if gpu is not None else native_for(self.layout) if native else None
        self.gpu = gpu
        self.runner = None if gpu is None else GpuRunner(gpu, self.layout)
        self.scratch = Scratch(self.layout)
        self.acquire_timeout_s = acquire_timeout_s
        self.pool = Pool(store, self.layout)
        self.pulls = Pulls(store, self.pool)
        self.committed: OrderedDict[bytes, None] = OrderedDict()  # bounded by REMEMBERED_BLOCKS; the newest last
        self._uses: Counter[tuple[int, int]] = Counter()  # by (arena's address, unit): how many tables have the block
        self._open: set[AnySequence] = set()

    @property
    def held_blocks(self) -> int:
        """Blocks that open sequences have, each counted once."""
        return len(self._uses)

    @property
    def shared_blocks(self) -> int:
        """Blocks more that they would have if none were shared."""
        return self._uses.total() - len(self._uses)

    def pull(self, tokens: Sequence[int], root: bytes, timeout_s: float | None = None) -> Future[Pulled]:
        """Begin to lease what the store has of a prompt under the fingerprint `root`."""
        if not tokens:
            raise InvalidArgument("the prompt has no tokens; give at least one")
        return self.pulls.start(tokens, root, self.acquire_timeout_s if timeout_s is None else timeout_s)

    def open(self, tokens: Sequence[int], root: bytes, pull: Future[Pulled] | None = None) -> "PagedSequence":
        """Begin a sequence with a prompt, waiting for its pull. A store that cannot be reached gives nothing, and is no error."""
        under_way = pull or self.pull(tokens, root)
        self.pool.prepare()
        pulled = under_way.result()
        sequence = PagedSequence(self, tokens, pulled)
        if pulled.tail is not None:
            sequence.take_tail(pulled, pulled.tail)
        return sequence

    def step(self, parts: Sequence[tuple[AnySequence, int]]) -> Step:
        """One forward pass that computes the next so many tokens of each sequence; `ensure` has found their slots."""
        ends = itertools.accumulate(count for _, count in parts)
        spans = [sequence.span(count, end - count) for (sequence, count), end in zip(parts, ends, strict=True)]
        return Step(spans, self.scratch, self.native, self._arrive([sequence for sequence, _ in parts]))

    def copy_block(self, place: Place, arena: ArenaRows, unit: int) -> None:
        """Make the block at a place equal to another one. It is done then: whoever is given the original back next may write to it."""
        if self.gpu is not None:
            self.gpu.views.require(arena.memory)
            self.gpu.views.require(place.arena.memory)
        place.arena.copy_block(place.unit, arena, unit)
        if self.gpu is not None:
            self.gpu.settle()

    def let_go(self, hold: Hold) -> None:
        """One sequence less has this; the last one gives it back."""
        hold.users -= 1
        if hold.users:
            return
        # Not the committed ones, but open blocks and copies of blocks that existed; before a slot that the lease frees is reserved anew.
        if held := [place for place in hold.places if place.shared]:
            self.store.abandon(slots_of(held))
        self.store.release(hold.lease)
        self.pool.put_back([place for place in hold.places if not place.shared])

    def known_blocks(self, pulled: Pulled) -> int:
        """How many of the blocks that a pull brought some open sequence has already."""
        return sum((pulled.arena.address, unit) in self._uses for unit in pulled.units)

    def store_is_away(self, error: EnvironmentFault) -> None:
        """It did not answer one of the sequences: none that is open asks again, since each would wait as long."""
        for sequence in self._open:
            sequence.fault = sequence.fault or error

    def remember(self, hashes: Sequence[bytes]) -> None:
        """These were committed just now."""
        for each in hashes:
            self.committed[each] = None
            self.committed.move_to_end(each)
        while len(self.committed) > REMEMBERED_BLOCKS:
            self.committed.popitem(last=False)

    def places(self, count: int, fault: EnvironmentFault | None) -> list[Place]:
        """From the store, or from this process's memory once the store is gone, as a sequence's `fault` says it is."""
        if fault is None:
            try:
                return self.pool.take(count)
            except ResourceExhausted:
                raise
            except EnvironmentFault as error:
                self.store_is_away(error)
        return self.pool.take_private(count)

    def opened(self, sequence: AnySequence) -> None:
        """A sequence has its first blocks."""
        self._open.add(sequence)
        self._uses.update(sequence.addresses())

    def added(self, place: Place) -> None:
        """A table has a block more."""
        self._uses[(place.arena.address, place.unit)] += 1

    def lost(self, blocks: Sequence[tuple[int, int]]) -> None:
        """A table no longer has these blocks."""
        for block in blocks:
            self._uses[block] -= 1
            if not self._uses[block]:
                del self._uses[block]

    def forget(self, sequence: AnySequence) -> None:
        """A sequence has closed."""
        if sequence in self._open:
            self._open.discard(sequence)
            self.lost(sequence.addresses())

    def close(self) -> None:
        """Close every sequence and wait for the pulls and reservations on their way. Idempotent."""
        for sequence in list(self._open):
            sequence.close()
        self.pulls.close()
        self.pool.close()
        if self.runner is not None:
            self.runner.close()

    def _arrive(self, sequences: Sequence[AnySequence]) -> Callable[[int], None] | None:
        """What is to be called with each layer of a step; None where nothing of these sequences is on its way."""
        arrivals = {arrival for each in sequences if (arrival := each.arrival) is not None and not arrival.done()}
        gpu = self.gpu
        if not arrivals or gpu is None:
            return None

        def follow(layer: int, stream: int) -> None:
            for arrival in arrivals:
                arrival.follow(layer, stream)

        return lambda layer: gpu.arrived(partial(follow, layer))


class PagedSequence:
    """One sequence: its tokens, where their KV lies, and what it holds of the store. See `sequences.AnySequence`."""

    unrotated, may_stop, step_tokens = False, True, sys.maxsize

    def __init__(self, cache: PagedCache, tokens: Sequence[int], pulled: Pulled, origin: "PagedSequence | None" = None) -> None:
        self.tokens = list(tokens)
        self.hash_s, self.acquire_s, self.reserve_s = pulled.hash_s, pulled.acquire_s, 0.0
        self._cache, self._root = cache, pulled.root
        self._size = cache.layout.tokens
        self._closed = False
        self.arrival: Arrival | None = pulled.arrival if origin is None else origin.arrival
        self._holds: list[Hold]  # the last one is where new places go
        self._own: list[tuple[Hold, Place]]  # of the blocks after those that came from the store, in order
        if origin is None:
            self.table = BlockTable(cache.layout)
            self.table.append(pulled.arena, pulled.units)
            self.fault = pulled.fault
            self._holds, self._own = [Hold(pulled.lease)], []
            self._hashes = bytearray(pulled.hashes)
            self._hit_blocks = self._committed = len(pulled.units)
            self.computed = self.hit_tokens = self._hit_blocks * self._size
        else:
            self.table, self.fault = origin.table.copy(), origin.fault
            self._holds, self._own = list(origin._holds), list(origin._own)
            for hold in self._holds:
                hold.users += 1
            self._hashes = bytearray(origin._hashes)
            self._hit_blocks, self._committed = origin._hit_blocks, origin._committed
            self.computed, self.hit_tokens = origin.computed, origin.hit_tokens
        cache.opened(self)

    def fork(self) -> "PagedSequence":
        """Another sequence with the same tokens, which shares every block until one of the two writes to it."""
        pulled = Pulled(0, self._root, b"", self._cache.pool.arena())
        return PagedSequence(self._cache, self.tokens, pulled, origin=self)

    def take_tail(self, pulled: Pulled, tail: Tail) -> None:
        """Go on after the first tokens of a stored block, in a copy of it; without them where there is no slot for one."""
        with contextlib.suppress(ResourceExhausted):
            place = self._cache.places(1, self.fault)[0]
            self._cache.copy_block(place, pulled.arena, tail.unit)
            self._add(place)
            self.computed += tail.tokens
            self.hit_tokens += tail.tokens
        self._cache.store.release(pulled.lease, keep_blocks=len(pulled.units))

    @property
    def blocks_missing(self) -> int:
        """Slots that `ensure` would need for all tokens that are not computed yet."""
        return -(-len(self.tokens) // self._size) - len(self.table)

    @property
    def stored_tokens(self) -> int:
        """Leading tokens whose KV is in blocks of the store that anybody can find."""
        return self._committed * self._size

    def hashes_to_come(self) -> set[bytes]:
        """The hashes of full blocks of its tokens that are not committed yet, as far as they are known."""
        return {bytes(self._hashes[at : at + HASH_BYTES]) for at in range(self._committed * HASH_BYTES, len(self._hashes), HASH_BYTES)}

    def addresses(self) -> list[tuple[int, int]]:
        """Its table's."""
        return self.table.addresses()

    def span(self, count: int, at: int) -> Span:
        """Its part in a step."""
        return Span(self.table, self.computed, count, at)

    def append(self, token: int) -> None:
        """Add a token, to be computed by a later step."""
        self.tokens.append(token)

    def ensure(self, count: int) -> None:
        """Find slots for the next `count` tokens. Raises ResourceExhausted where the store has no more to give; then nothing changes."""
        copies = 1 if self._tail_is_shared() else 0
        needed = -(-(self.computed + count) // self._size) - len(self.table)
        if needed + copies <= 0:
            return
        began_at = time.perf_counter()
        places = self._cache.places(needed + copies, self.fault)
        if self._holds[-1].users > 1:
            self._holds.append(Hold(self._cache.pulls.new_lease()))
        if copies:
            try:
                self._copy_tail(places[0])
            except EnvironmentFault:
                self._holds[-1].places.extend(places)  # they go with the sequence
                raise
        for place in places[copies:]:
            self._add(place)
        self._cache.pool.prepare()
        self.reserve_s += time.perf_counter() - began_at

    def advance(self, count: int) -> None:
        """A step has filled the next `count` tokens' slots: commits the blocks that are now full."""
        self.computed += count
        last = self.computed // self._size
        while self._committed < last:
            first = self._committed
            hold, places = _run(self._own[first - self._hit_blocks : last - self._hit_blocks])
            if not places:
                return
            self._hash_up_to(first + len(places))
            hashes = bytes(self._hashes[first * HASH_BYTES : (first + len(places)) * HASH_BYTES])
            tokens = self.tokens[first * self._size : (first + len(places)) * self._size] if self._cache.store.tails else None
            self._cache.store.commit(hold.lease, slots_of(places), hashes, self._hash_before(first), tokens)
            self._cache.remember([hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)])
            self._committed += len(places)

    def close(self) -> None:
        """Give back all that the sequence holds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._cache.forget(self)
        for hold in self._holds:
            self._cache.let_go(hold)

    def _add(self, place: Place) -> None:
        hold = self._holds[-1]
        hold.places.append(place)
        self._own.append((hold, place))
        self.table.append(place.arena, [place.unit])
        self._cache.added(place)

    def _tail_is_shared(self) -> bool:
        """Whether the next token goes to a block that another sequence has too."""
        return bool(self.computed % self._size) and len(self.table) * self._size > self.computed and self._own[-1][0].users > 1

    def _copy_tail(self, place: Place) -> None:
        """Go on in a copy of the last block."""
        _, shared = self._own[-1]
        self._cache.copy_block(place, shared.arena, shared.unit)
        self._own.pop()
        self.table.pop()
        self._cache.lost([(shared.arena.address, shared.unit)])
        self._add(place)

    def _hash_up_to(self, blocks: int) -> None:
        have = len(self._hashes) // HASH_BYTES
        if blocks > have:
            tokens = self.tokens[have * self._size : blocks * self._size]
            self._hashes += block_hashes(self._hash_before(have), tokens, self._size)

    def _hash_before(self, block: int) -> bytes:
        return bytes(self._hashes[(block - 1) * HASH_BYTES : block * HASH_BYTES]) if block else self._root


def _run(own: Sequence[tuple[Hold, Place]]) -> tuple[Hold, list[Place]]:
    """The leading places that the store knows under one lease."""
    hold = own[0][0]
    places = itertools.takewhile(lambda each: each[0] is hold and each[1].shared, own)
    return hold, [place for _, place in places]
