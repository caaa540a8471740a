"""What a worker's engine is asked, and what it tells of it while it works: the words between the engine and whoever serves it.

An engine is given a `Request` and a function to call with each `Event`, and gives back a `Ticket`. Events come from the engine's own
thread, in order, and end with one `Ended` for each branch; the function must be quick and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvstore.errors import KVStoreError

DEFAULT_SINKS = 4  # tokens: what StreamingLLM keeps of a text's beginning


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy.

    temperature     0: the likeliest token; else logits are divided by it
    top_p, top_k    keep the likeliest of so much mass, so many (0: all)
    min_p           keep tokens at least so likely as this share of the likeliest
    presence_penalty, frequency_penalty   taken from the logits of tokens made so far: once, and for each time
    seed            None: unlike every other request. Branch b of a request draws from (seed, b)
    logprobs        so many of the likeliest tokens are told with each token, besides its own; -1: no logprobs at all
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int = -1


@dataclass(frozen=True)
class Request:
    """A prompt to continue until the model ends the text or `max_tokens` are made.

    n            samples of one prompt, which share its blocks; branch 0 .. n-1
    beams        0: none. Else the `n` likeliest texts of a beam search of this width; their tokens come all at the end
    priority     a higher one goes first
    ignore_eos   go on to `max_tokens` whatever the model says
    window       0: every token attends to all before it, and the text is as long as the model takes. Else a stream without an end
                 (streaming.py): a token attends to the first `sinks` tokens and to the last `window`; nothing goes into the store
    """

    tokens: Sequence[int]
    max_tokens: int
    salt: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    beams: int = 0
    priority: int = 0
    ignore_eos: bool = False
    window: int = 0
    sinks: int = DEFAULT_SINKS


class Finish(StrEnum):
    """Why a branch ended."""

    EOS = "eos"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Choice:
    """A token that was chosen; `logprob` and `top` (the likeliest, best first) are natural logarithms, where they were asked for."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Started:
    """The prompt is about to be computed: so many of its tokens have their KV from the store. Told once."""

    hit_tokens: int
    queued_s: float


@dataclass(frozen=True)
class Made:
    """A branch has a token more."""

    branch: int
    choice: Choice


@dataclass(frozen=True)
class Ended:
    """A branch is over. `error` with FAILED: the tokens made before it are right, and there are no more."""

    branch: int
    finish: Finish
    error: KVStoreError | None = None


Event = Started | Made | Ended
Listener = Callable[[Event], None]


class Ticket(Protocol):
    """A request that an engine has taken."""

    def cancel(self, branch: int | None = None) -> None:
        """End one branch, or all, as soon as the step under way is over. Any thread; no error where it has ended."""


class Serving(Protocol):
    """An engine as whoever serves it sees it. Any thread may call."""

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Take a request.

        Raises InvalidArgument and LimitExceeded for one that the model cannot serve, ResourceExhausted when too many wait.
        """

    def figures(self) -> dict[str, float]:
        """Counters and gauges by metric name (without a prefix); names that end in _total only ever rise."""

    def health(self) -> str:
        """Why no request would be answered now; "" where they are."""
