"""What the engine and a step know of a sequence, whichever kind it is: `paged.PagedSequence`, or `streaming.StreamSequence`."""

from __future__ import annotations

from typing import Protocol

from kvstore.clients.blocks import Arrival
from kvstore.errors import EnvironmentFault
from kvstore.worker.spans import Span


class AnySequence(Protocol):
    """A sequence that is open. Calls by turns: ensure → (a step over its span) → advance; `close` at the end.

    tokens       the prompt and what was added since         computed    how many of them have been computed
    hit_tokens   how many of those came from the store       fault       what kept the store from being used, if anything did
    arrival      blocks of those that may still be on their way into a GPU's memory
    unrotated    the model is told position 0 for each of its tokens: their keys are rotated when they are read
    hash_s, acquire_s, reserve_s    seconds that its beginning took
    """

    tokens: list[int]
    computed: int
    hit_tokens: int
    fault: EnvironmentFault | None
    arrival: Arrival | None
    unrotated: bool
    hash_s: float
    acquire_s: float
    reserve_s: float

    @property
    def blocks_missing(self) -> int:
        """Slots that it would need for all tokens that are not computed yet."""

    @property
    def stored_tokens(self) -> int:
        """Leading tokens whose KV is in blocks of the store that anybody can find."""

    @property
    def may_stop(self) -> bool:
        """Whether it can be closed now and go on later, in another sequence with the same tokens."""

    @property
    def step_tokens(self) -> int:
        """The most of its tokens that one step may compute."""

    def hashes_to_come(self) -> set[bytes]:
        """The hashes of full blocks of its tokens that it is going to commit, as far as they are known."""

    def addresses(self) -> list[tuple[int, int]]:
        """The blocks that it has, as (its arena's address, its unit)."""

    def append(self, token: int) -> None:
        """Add a token, to be computed by a later step."""

    def ensure(self, count: int) -> None:
        """Find slots for the next `count` tokens. Raises ResourceExhausted where the store has no more to give; then nothing changes."""

    def span(self, count: int, at: int) -> Span:
        """Its part in a step that computes the next `count` tokens, of which its first is number `at`."""

    def advance(self, count: int) -> None:
        """A step has filled the next `count` tokens' slots."""

    def fork(self) -> AnySequence:
        """Another sequence with the same tokens and blocks."""

    def close(self) -> None:
        """Give back all that it holds. Idempotent."""
