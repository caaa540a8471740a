"""A request under way: its branches, what each has made, and where each one's time went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from kvstore.errors import KVStoreError
from kvstore.worker.beams import BeamSearch
from kvstore.worker.pulls import Pulled
from kvstore.worker.requests import Finish, Listener, Request
from kvstore.worker.sampling import Sampler
from kvstore.worker.sequences import AnySequence


@dataclass
class Timings:
    """Where one branch's time to the first token went. `ttft_s` counts from the request's arrival, others of the batch included."""

    ttft_s: float = 0.0
    hash_s: float = 0.0
    acquire_s: float = 0.0
    reserve_s: float = 0.0
    gather_s: float = 0.0
    write_s: float = 0.0
    compute_s: float = 0.0
    sample_s: float = 0.0
    decode_s: float = 0.0


@dataclass
class Completion:
    """What became of one branch. `error` with FAILED: the tokens made before it are right, and there are no more.

    hit_tokens      prompt tokens whose KV came from the store      store_fault     why the store was not used to the end, "" if it was
    first_logits    [vocab] of the first token                      preemptions     how often it was stopped for others' sake
    """

    tokens: list[int] = field(default_factory=list)
    finish: Finish = Finish.LENGTH
    hit_tokens: int = 0
    preemptions: int = 0
    store_fault: str = ""
    error: KVStoreError | None = None
    first_logits: Tensor | None = None
    timings: Timings = field(default_factory=Timings)


@dataclass(eq=False)
class Job:
    """One request. `root` is the fingerprint of its chain."""

    request: Request
    listener: Listener
    root: bytes
    arrived_at: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.perf_counter)
    started: bool = False  # it was admitted once, and its listener was told
    forked: bool = False  # its prompt was computed, and each branch goes on by itself
    search: BeamSearch | None = None  # its branches are beams: all in a step, or none
    stalls: int = 0  # how often its beams could not all be in a step, and nothing else could either
    branches: list[Branch] = field(default_factory=list)


@dataclass(eq=False)
class Branch:
    """One continuation of a request's prompt. It waits while it has no sequence; see `scheduler.Schedulable`.

    hashes          32 bytes a block of the prompt, where they were needed to guess hot_tokens, which is set while it waits
    asked_again     the hash of the block for which its pull was made anew
    stored_tokens   how many of its tokens' KV it left in the store when it was stopped
    not_before      monotonic seconds until which it is not admitted      starved_since   when it first got no slots though alone
    starved_at      how many of its tokens were computed when it last got none though alone
    """

    job: Job
    index: int
    sampler: Sampler
    completion: Completion = field(default_factory=Completion)
    sequence: AnySequence | None = None
    pull: Future[Pulled] | None = None
    hashes: bytes | None = None
    hot_tokens: int = 0
    asked_again: bytes = b""
    stored_tokens: int = 0
    not_before: float = 0.0
    starved_since: float | None = None
    starved_at: int = -1
    ended: bool = False

    @property
    def mates(self) -> list[Branch]:
        """Those that must be in a step with it, itself included: of a beam search all living beams."""
        job = self.job
        return job.branches[: len(job.search.tokens)] if job.search and job.forked else [self]

    @property
    def priority(self) -> int:
        """Its request's."""
        return self.job.request.priority

    @property
    def arrived_at(self) -> float:
        """Its request's."""
        return self.job.arrived_at

    @property
    def made(self) -> list[int]:
        """Tokens made so far."""
        return self.completion.tokens

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt and what was made."""
        return [*self.job.request.tokens, *self.made]

    @property
    def tokens_to_come(self) -> int:
        """Tokens that are known and not computed yet."""
        return len(self.sequence.tokens) - self.sequence.computed if self.sequence else len(self.tokens)

    @property
    def tokens_to_make(self) -> int:
        """The most that it still makes."""
        return self.job.request.max_tokens - len(self.made)

    @property
    def tokens_ready(self) -> int:
        """How many of those may be computed now: the last one of a beam only together with its mates', of a stream not too many."""
        mates = self.mates
        last_waits = len(mates) > 1 and any(each.sequence is None or each.tokens_to_come > 1 for each in mates)
        ready = self.tokens_to_come - last_waits
        return min(ready, self.sequence.step_tokens) if self.sequence else ready

    @property
    def is_stream(self) -> bool:
        """Whether it keeps only its first tokens and a window."""
        return bool(self.job.request.window)

    @property
    def may_stop(self) -> bool:
        """Whether it may be stopped for others' sake, and go on later."""
        return self.sequence is None or self.sequence.may_stop

    @property
    def seats(self) -> int:
        """How many sequences it becomes once its prompt is computed."""
        return 1 if self.job.forked else len(self.job.branches)
