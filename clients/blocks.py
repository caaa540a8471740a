"""What a paged KV cache asks of a store, whoever provides it.

Two providers: `clients.blocksession` (a daemon over gRPC, its arena mapped) and `worker.standalone` (an arena of one's own).
Slots are named by their offset in 4 KiB units and a generation. Lease ids are the caller's: any positive integer, unique among its
live leases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import GeometryError
from kvstore.geometry import Geometry

Tokens = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True)
class Prompt:
    """What finds a partial tail: all token ids of a prompt, and the hash before its first block (the fingerprint).

    Where positions stand for something else too, as for an image, the ids end before the first of them: a tail goes by ids alone.
    """

    tokens: Tokens
    root: bytes


@dataclass(frozen=True)
class Tail:
    """A stored block, the donor, whose first `tokens` tokens are those of the prompt after its whole blocks. At least one."""

    unit: int
    generation: int
    tokens: int


class Arrival(Protocol):
    """Blocks that are on their way into a GPU's memory, layer by layer. Any thread."""

    def follow(self, layer: int, stream: int) -> None:
        """What is queued on `stream`, a handle of the driver, from now on sees this layer. Raises Unavailable where they are lost."""

    def done(self) -> bool:
        """Whether all have arrived; then nothing needs to follow."""


@dataclass(frozen=True)
class Slots:
    """Parallel arrays, one row a slot: `units` [n] uint32 (offset in 4 KiB units), `generations` [n] uint32.

    `tail`, only from an acquire with a prompt: what is usable beyond these blocks. It is under the same lease, as one more block
    after them: copy its first tokens to a slot of your own (`worker.tails`), then `release(lease, keep_blocks=len(slots))`.
    `arrival`, only where slots lie in a GPU's memory: those of them that come up from the host's are not to be read before it.
    """

    units: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    tail: Tail | None = None
    arrival: Arrival | None = None

    def __len__(self) -> int:
        return len(self.units)


def require_tails(geometry: Geometry) -> None:
    """Raises GeometryError where the first tokens of a block are of no use without the rest."""
    if not geometry.tokens_apart:
        raise GeometryError("such blocks have no tails: use kv1, with one scale a token or none; or open the store without tails")


class BlockStore(Protocol):
    """One namespace of a store, as its paged cache sees it. Thread-safe; only `acquire` and `reserve` may wait."""

    @property
    def geometry(self) -> Geometry:
        """The layout of this namespace's blocks."""

    @property
    def arena(self) -> NDArray[np.uint8]:
        """The whole arena, writable (a GPU's: as torch's tensor). Write only into slots that are reserved and not yet committed."""

    @property
    def tails(self) -> bool:
        """Whether token ids are kept, so that an acquire finds partial tails. Where not, those given to it are of no use, and no error."""

    def acquire(self, lease: int, hashes: bytes, timeout_s: float, prompt: Prompt | None = None) -> Slots:
        """Lease the leading blocks of packed `hashes` that the store has, brought into the arena; they stay until `release`.

        Fewer than asked, down to none, where blocks are missing, could not be read, or the timeout passed. With `prompt` (then `hashes`
        may be empty) a partial tail too: whole blocks and tail together never reach the prompt's last token, if `hashes` does not.
        Raises errors.Unavailable when the store is gone (the caller goes on without it).
        """

    def reserve(self, count: int) -> Slots:
        """Up to `count` slots to fill, private until committed. Fewer when the store is full of held blocks."""

    def commit(self, lease: int, slots: Slots, hashes: bytes, parent: bytes, tokens: Tokens | None = None) -> None:
        """Publish filled slots as consecutive blocks of one chain, and hold them under `lease`. Returns at once.

        `tokens`: all ids of these blocks, which makes them donors of tails; where they do not hash to the blocks' names nothing is
        published. None for blocks with extra keys.

        `hashes` 32 bytes a slot; `parent` the hash before the first. Where a block exists already the slot stays private:
        it remains readable by this caller until `abandon`. Failures are counted and never raised here.
        """

    def abandon(self, slots: Slots) -> None:
        """Give reserved, uncommitted (or duplicate) slots back. Returns at once."""

    def release(self, lease: int, keep_blocks: int = 0) -> None:
        """End a lease, or all of it past its first blocks. Unknown leases are no error. Returns at once."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until every earlier commit has been answered; False when the timeout passed."""

    def close(self) -> None:
        """Release everything. Idempotent."""
