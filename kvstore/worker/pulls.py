"""Brings what the store has of a prompt within reach while its request waits: hashes it, and leases its leading blocks.

In threads of their own, since an acquire waits for blocks on their way up. A pull is used by one sequence, or dropped.
"""

import itertools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from kvstore.clients.blocks import Arrival, BlockStore, Prompt, Tail
from kvstore.errors import EnvironmentFault, KVStoreError, Unavailable
from kvstore.hashing import HASH_BYTES, block_hashes, usable_blocks
from kvstore.worker.pool import Pool
from kvstore.worker.rows import ArenaRows

PULL_THREADS = 4  # pulls under way at once; the store itself keeps the disk's queue full

log = logging.getLogger(__name__)


@dataclass
class Pulled:
    """What came of a pull: blocks at `units` of `arena`, leased under `lease`; `fault`: what kept the store from being used.

    hashes      32 bytes a block, of all full blocks of the prompt
    arrival     what is to be waited for before they are read, where they are on their way into a GPU's memory
    tail        a block that begins as the prompt goes on after those; it is under the same lease until `PagedSequence` has copied it
    """

    lease: int
    root: bytes
    hashes: bytes
    arena: ArenaRows
    units: list[int] = field(default_factory=list)
    tail: Tail | None = None
    arrival: Arrival | None = None
    fault: EnvironmentFault | None = None
    hash_s: float = 0.0
    acquire_s: float = 0.0


class Pulls:
    """Pulls from one store. One thread calls; `close` waits for those under way."""

    def __init__(self, store: BlockStore, pool: Pool) -> None:
        self._store, self._pool = store, pool
        self._dropped: set[Future[Pulled]] = set()
        self._leases = itertools.count(1)
        self._threads = ThreadPoolExecutor(PULL_THREADS, thread_name_prefix="kvstore-pull")

    def new_lease(self) -> int:
        """A lease id that nobody else has."""
        return next(self._leases)

    def start(self, tokens: Sequence[int], root: bytes, timeout_s: float) -> Future[Pulled]:
        """Hash a prompt and lease what the store has of it, in the background. At least its last token stays to be computed."""
        return self._threads.submit(self._pull, list(tokens), root, self.new_lease(), timeout_s)

    def drop(self, pull: Future[Pulled]) -> None:
        """Give back what an unused pull has brought, or is about to bring."""
        if not pull.cancel():
            self._dropped.add(pull)
            pull.add_done_callback(self._release)

    def letting_go(self) -> list[Future[Pulled]]:
        """Dropped pulls that may still hold something of the store for a moment."""
        return list(self._dropped)

    def close(self) -> None:
        """Wait for what is under way. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _release(self, pull: Future[Pulled]) -> None:
        if not pull.cancelled() and pull.exception() is None:
            self._store.release(pull.result().lease)
        self._dropped.discard(pull)

    def _pull(self, tokens: Sequence[int], root: bytes, lease: int, timeout_s: float) -> Pulled:
        began_at = time.perf_counter()
        size = self._store.geometry.block_tokens
        pulled = Pulled(lease, root, block_hashes(root, tokens, size), self._pool.arena())
        hashed_at = time.perf_counter()
        usable = usable_blocks(len(tokens), size)
        looks_for_tail = self._store.tails and len(tokens) > 1
        if (usable or looks_for_tail) and timeout_s > 0:
            try:
                slots = self._store.acquire(lease, pulled.hashes[: usable * HASH_BYTES], timeout_s, Prompt(tokens, root))
            except EnvironmentFault as error:
                pulled.fault = error
            except KVStoreError as error:  # a fault of ours: the prompt is computed, as without a store
                log.exception("a prompt could not be looked for in the store")
                pulled.fault = Unavailable(f"the store refused the prompt: {error}")
            else:
                if self._pool.arena() is not pulled.arena or len(slots) > usable:
                    self._store.release(lease)
                else:
                    pulled.units, pulled.tail, pulled.arrival = slots.units.tolist(), slots.tail, slots.arrival
        pulled.hash_s, pulled.acquire_s = hashed_at - began_at, time.perf_counter() - hashed_at
        return pulled
