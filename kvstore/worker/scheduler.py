"""Decides which sequences go into the next step, in what order others are admitted, and who gives way: rules without any I/O.

    order       who of those that wait goes first          share       how a step's tokens are divided
    gives_way   who of those that run is stopped           Room        how many blocks this worker may count on
    slice_blocks   what is kept free so that whoever comes back is not stopped at once
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

DEFAULT_STEP_TOKENS = 512  # tokens of one step: on two cores and a small model some 0.3 s, the longest that a decode waits for prompts
DEFAULT_RUNNING = 64  # sequences: that run at once; more would each wait longer for their next token
AGE_S = 2.0  # seconds of waiting that are worth one level of priority: nobody is overtaken for ever
ACQUIRE_TIMEOUT_S = 10.0  # a prompt's wait for blocks on their way up: past that, computing them is faster
REGAIN_S = 1.0  # seconds until a worker that was refused slots counts on some more again
REGAIN_PART = 0.05  # of all blocks
SLICE_TOKENS = 16  # tokens that one who was stopped can make once it is back: fewer are not worth its load, more leave room unused


@dataclass(frozen=True)
class Rules:
    """What an engine is told once.

    step_tokens     None: a prompt is computed alone in a step of its own, so that its bits are those of a model without any batching
    """

    step_tokens: int | None = None
    running: int = DEFAULT_RUNNING
    age_s: float = AGE_S


class Schedulable(Protocol):
    """A sequence, or one to be, as these rules see it. `arrived_at` and `now` are monotonic seconds."""

    @property
    def priority(self) -> int:
        """A higher one goes first."""

    @property
    def arrived_at(self) -> float:
        """When its request came. It does not change when a sequence is stopped and waits again."""

    @property
    def hot_tokens(self) -> int:
        """How many of its leading tokens are likely to be in the store."""

    @property
    def tokens_to_come(self) -> int:
        """Tokens that are known and not computed yet: 1 when it decodes."""


    @property
    def tokens_ready(self) -> int:
        """How many of those may be computed now."""

    @property
    def may_stop(self) -> bool:
        """Whether it may be stopped for others' sake."""


S = TypeVar("S", bound=Schedulable)


def order(waiting: Iterable[S], now: float, rules: Rules) -> list[S]:
    """Those that wait, the next first: by priority, which rises with age; then the longest hot prefix; then the oldest."""

    def key(each: S) -> tuple[int, int, float]:
        return -(each.priority + int((now - each.arrived_at) / rules.age_s)), -each.hot_tokens, each.arrived_at

    return sorted(waiting, key=key)


def share(running: Sequence[S], rules: Rules) -> list[tuple[S, int]]:
    """Who computes how many tokens in the next step: everybody who decodes one, and prompts, the first in rank first, what is left.

    A prompt gets at least one token, so that it moves on however many decode.
    """
    decoding = [(each, 1) for each in running if each.tokens_to_come == each.tokens_ready == 1]
    prompts = sorted((each for each in running if each.tokens_to_come > 1 and each.tokens_ready), key=lambda each: rank(each, rules))
    if rules.step_tokens is None:
        return [(each, each.tokens_ready) for each in prompts[:1]] or decoding
    left = max(rules.step_tokens - len(decoding), 1)
    parts = []
    for each in prompts:
        if left <= 0:
            break
        count = min(each.tokens_ready, left)
        parts.append((each, count))
        left -= count
    return decoding + parts


def rank(each: Schedulable, rules: Rules) -> float:
    """The lower, the more right to slots and to a step's tokens: the second of arrival, made earlier by `age_s` for each priority.

    It does not change while a sequence runs, so two never stop each other by turns. Whoever comes later than the difference of two
    priorities is worth has a higher one: nobody who runs is held up for ever by those that come.
    """
    return each.arrived_at - each.priority * rules.age_s


def gives_way(running: Iterable[S], needy: S, rules: Rules) -> S | None:
    """Who is stopped so that `needy` gets slots: the last in rank that may be, `needy` itself if it is; None if there is no other."""
    others = [each for each in running if each.may_stop]
    if all(each is needy for each in others):
        return None
    return max([*others, needy], key=lambda each: rank(each, rules))


def slice_blocks(tokens_to_make: int, block_tokens: int) -> int:
    """Blocks that a sequence fills in one time slice: `SLICE_TOKENS`, or the few that it still has to make."""
    return -(-min(tokens_to_make, SLICE_TOKENS) // block_tokens)


class Room:
    """How many blocks this worker may count on, out of `capacity_blocks`: less once the store refused, since others hold the rest."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._ceiling_blocks = float(capacity_blocks)
        self._refused_at = 0.0

    def resize(self, capacity_blocks: int) -> None:
        """The store may have come back with more or less memory."""
        if capacity_blocks != self.capacity_blocks:
            self.capacity_blocks, self._ceiling_blocks = capacity_blocks, float(capacity_blocks)

    @property
    def blocks(self) -> int:
        """The most to hold now."""
        return int(self._ceiling_blocks)

    def refused(self, held_blocks: int, now: float) -> None:
        """The store had no more with so many held."""
        self._ceiling_blocks, self._refused_at = min(self._ceiling_blocks, float(max(held_blocks, 1))), now

    def look(self, held_blocks: int, now: float) -> None:
        """Count on more again: on what is held in any case, and on a little more each second."""
        self._ceiling_blocks = max(self._ceiling_blocks, float(held_blocks))
        if self._ceiling_blocks < self.capacity_blocks and now - self._refused_at >= REGAIN_S:
            self._refused_at = now
            self._ceiling_blocks = min(self._ceiling_blocks + self.capacity_blocks * REGAIN_PART, float(self.capacity_blocks))
