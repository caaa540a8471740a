"""Continuous batching over the paged cache: at every step sequences join and leave, and prompts share steps with those that decode.

One thread calls an engine. `add` takes requests, each `step` computes one forward pass and tells the requests' listeners; `generate`
does both for a caller who wants to wait. `serving.py` runs an engine in a thread of its own.

A step: pulls begin for those that wait (pulls.py) → those whose pull is done and for whom there is room are admitted → tokens are shared
out (scheduler.py) → slots are found, or somebody gives way → forward → full blocks are committed, tokens are chosen and told.
"""

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvstore.clients.blocks import BlockStore
from kvstore.errors import GeometryError, InternalFault, InvalidArgument, KVStoreError, LimitExceeded, ResourceExhausted
from kvstore.hashing import fingerprint
from kvstore.worker import attention
from kvstore.worker.admission import Admission
from kvstore.worker.branch import Branch, Completion, Job, Timings
from kvstore.worker.costs import Costs
from kvstore.worker.forward import forward
from kvstore.worker.model import LoadedModel
from kvstore.worker.paged import PagedCache, PagedSequence
from kvstore.worker.requests import Choice, Ended, Event, Finish, Listener, Made, Request, Started
from kvstore.worker.sampling import Sampler, choose_all
from kvstore.worker.scheduler import Room, Rules, gives_way, share

MAX_BATCH_SEQUENCES = 64  # of one call of `generate`
BACKOFF_S = 0.05  # a sequence that got no slots though alone waits so long for others' workers to move on
IDLE_WAIT_S = 0.05  # the longest that a step waits for a pull when there is nothing to compute

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """`patience_s`: how long a sequence may wait for slots that only other workers hold, before it fails. 0: not at all."""

    rules: Rules = field(default_factory=Rules)
    patience_s: float = 0.0
    keep_logits: bool = True


class Engine:
    """One model over one store. `close` gives back what it holds and leaves the store open."""

    def __init__(self, loaded: LoadedModel, store: BlockStore, options: Options | None = None) -> None:
        geometry = loaded.geometry(store.geometry.block_tokens)
        if geometry != store.geometry:
            raise GeometryError(f"the store's blocks are {store.geometry}, the model's {geometry}; open it with the model's geometry")
        self.options = options or Options()
        self._loaded = loaded
        self._cache = PagedCache(store)
        self._costs = Costs(store.geometry.block_tokens)
        self._room = Room(len(store.arena) // store.geometry.slot_bytes)
        self._admission = Admission(self._cache, self.options.rules, self._costs, self._room)
        self._running: list[Branch] = []
        self.counters: Counter[str] = Counter()

    def add(self, request: Request, listener: Listener) -> Job:
        """Take a request; later steps serve it. Raises InvalidArgument and LimitExceeded for one that the model cannot serve."""
        self.check(request)
        job = Job(request, listener, fingerprint(self._loaded.identity_for(request.salt)))
        job.branches.extend(Branch(job, index, Sampler(request.sampling, index)) for index in range(request.n))
        self._admission.waiting.append(job.branches[0])
        self.counters["requests_total"] += 1
        self.counters["prompt_tokens_total"] += len(request.tokens)
        return job

    def cancel(self, job: Job, branch: int | None = None) -> None:
        """End one branch of a request, or all. No error where it has ended."""
        for each in job.branches if branch is None else job.branches[branch : branch + 1]:
            self._end(each, Finish.CANCELLED)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """The model attends through the paged cache inside. `step` may be called only there, by the same thread."""
        with torch.inference_mode(), attention.paged(self._loaded.model):
            yield

    def step(self) -> bool:
        """One forward pass, where anything is ready for one; whether there is anything left to do."""
        now = time.monotonic()
        self._room.look(self._cache.held_blocks, now)
        for branch in self._admission.look(self._running, now):
            self._running.append(branch)
            self._begin(branch, now)
        parts = self._with_slots(share(self._running, self.options.rules), now)
        if parts:
            self._compute(parts)
        elif under_way := self._admission.under_way():
            wait(under_way, IDLE_WAIT_S, return_when=FIRST_COMPLETED)
        elif self._admission.waiting:
            time.sleep(BACKOFF_S / 4)
        busy = bool(self._running or self._admission.waiting)
        if not busy:
            self._cache.pool.give_back()
        return busy

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests and wait: of each its first branch, in their order; a failed one says so, and the others go on.

        Raises InvalidArgument and LimitExceeded for requests that no model could serve, before any work.
        """
        return [branches[0] for branches in self.generate_all(requests)]

    def generate_all(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """As `generate`, with all branches of each request."""
        if len(requests) > MAX_BATCH_SEQUENCES:
            raise LimitExceeded(f"{len(requests)} sequences in one batch, the most is {MAX_BATCH_SEQUENCES}; send fewer at a time")
        for request in requests:
            self.check(request)
        jobs = [self.add(request, _nobody) for request in requests]
        try:
            with self.at_work():
                while self.step():
                    pass
        except BaseException:
            self.drop_all()
            raise
        return [[branch.completion for branch in job.branches] for job in jobs]

    def check(self, request: Request) -> None:
        """Raises InvalidArgument and LimitExceeded for a request that the model cannot serve."""
        total, vocabulary = len(request.tokens) + request.max_tokens, int(self._loaded.model.config.vocab_size)
        if not len(request.tokens) or request.max_tokens < 1:
            raise InvalidArgument("a request needs at least one token in its prompt, and one to make")
        if total > self._loaded.max_tokens:
            raise LimitExceeded(f"{total} tokens of prompt and answer, the model takes {self._loaded.max_tokens}; shorten either")
        if min(request.tokens) < 0 or max(request.tokens) >= vocabulary:
            raise InvalidArgument(f"a token id is outside 0..{vocabulary - 1}; use the model's own tokenizer")
        if not 1 <= request.n <= self.options.rules.running:
            raise InvalidArgument(f"n is {request.n}; at most {self.options.rules.running} sequences run at once here")

    def drop_all(self, error: KVStoreError | None = None) -> None:
        """End everything at once: as failed, with an error; else as cancelled."""
        for branch in [*self._running, *self._admission.waiting]:
            for each in branch.job.branches:
                self._fail(each, error) if error else self._end(each, Finish.CANCELLED)
        self._cache.pool.give_back()

    @property
    def waiting(self) -> int:
        """How many sequences wait to run. Any thread."""
        return len(self._admission.waiting)

    def figures(self) -> dict[str, float]:
        """Counters and gauges, see `requests.Serving`. Any thread: each number is right, and they may be of different moments."""
        gauges = {
            "running": len(self._running),
            "waiting": len(self._admission.waiting),
            "held_blocks": self._cache.held_blocks,
            "shared_blocks": self._cache.shared_blocks,
            "room_blocks": self._room.blocks,
            "prefill_tokens_per_second": self._costs.compute_tokens_per_s,
            "load_blocks_per_second": self._costs.load_blocks_per_s,
        }
        return {**gauges, **self.counters}

    def close(self) -> None:
        """End everything. Idempotent."""
        self.drop_all()
        self._admission.close()
        self._cache.close()

    # ----

    def _begin(self, branch: Branch, now: float) -> None:
        """A branch has been admitted, for the first time or again."""
        hit_tokens = _sequence(branch).hit_tokens
        if branch.job.started:
            self.counters["resumed_hit_tokens_total"] += hit_tokens
            return
        branch.job.started = True
        branch.completion.hit_tokens = hit_tokens
        self.counters["hit_tokens_total"] += hit_tokens
        self._tell(branch, Started(hit_tokens, now - branch.arrived_at))

    def _with_slots(self, parts: list[tuple[Branch, int]], now: float) -> list[tuple[Branch, int]]:
        """The parts for whose tokens there are slots, after others have given way where there were none."""
        ready: list[tuple[Branch, int]] = []
        for branch, count in parts:
            while branch.sequence is not None:
                try:
                    branch.sequence.ensure(count)
                except ResourceExhausted as error:
                    self._make_room(branch, error, now)
                else:
                    branch.starved_since = None
                    ready.append((branch, count))
                    break
        return [(branch, count) for branch, count in ready if branch.sequence is not None]

    def _make_room(self, needy: Branch, error: KVStoreError, now: float) -> None:
        """Give something back so that a sequence may have slots: what waiting requests hold; then the last in rank gives way."""
        self._room.refused(self._cache.held_blocks, now)
        if self._admission.drop_one_pull():
            return
        victim = gives_way(self._running, needy)
        if victim is not None:
            self._preempt(victim)
            return
        if needy.starved_since is None:
            needy.starved_since = now
        if now - needy.starved_since >= self.options.patience_s:
            self._fail(needy, error)
        else:  # others' workers hold the rest: what this one has may be what they wait for
            self._preempt(needy)
            needy.not_before = now + BACKOFF_S

    def _preempt(self, branch: Branch) -> None:
        """Stop a sequence. Its full blocks are in the store: it goes on from there, as far as they are still to be had then."""
        self.counters["preemptions_total"] += 1
        self._note_fault(branch)
        _sequence(branch).close()
        branch.sequence = None
        self._running.remove(branch)
        self._admission.waiting.append(branch)

    def _compute(self, parts: Sequence[tuple[Branch, int]]) -> None:
        """One forward pass, and what follows from it."""
        began_at = time.perf_counter()
        timings = Timings()
        logits = self._forward(parts, timings)
        took_s = time.perf_counter() - began_at
        self._costs.computed(sum(count for _, count in parts), took_s)
        self.counters["steps_total"] += 1
        rows: list[tuple[Branch, int]] = []
        known = 0
        for branch, count in parts:
            mine, sequence = branch.completion.timings, _sequence(branch)
            if branch.made:
                mine.decode_s += took_s
            else:
                for part in ("gather_s", "write_s", "compute_s"):
                    setattr(mine, part, getattr(mine, part) + getattr(timings, part))
            sequence.advance(count)
            if sequence.computed == len(sequence.tokens):
                rows.extend((each, known) for each in self._forked(branch))
                known += 1
        if rows:
            self._choose(rows, logits)

    def _forward(self, parts: Sequence[tuple[Branch, int]], timings: Timings) -> Tensor:
        """Logits [known, vocab] after the parts whose tokens are all computed then, in their order."""
        return forward(self._loaded, self._cache, [(_sequence(branch), count) for branch, count in parts], timings)

    def _forked(self, branch: Branch) -> list[Branch]:
        """The branches that go on from here: itself, and when it is a prompt that was just computed its other samples."""
        job = branch.job
        if job.forked:
            return [branch]
        job.forked = True
        for other in job.branches[1:]:
            if not other.ended:
                other.sequence = _sequence(branch).fork()
                other.completion.hit_tokens = branch.completion.hit_tokens
                self._running.append(other)
        going = [each for each in job.branches if not each.ended]
        if branch.ended:  # cancelled while its prompt was computed for the others
            self._let_go(branch)
        return going

    def _choose(self, rows: Sequence[tuple[Branch, int]], logits: Tensor) -> None:
        """Choose and tell the next token of each branch, from the row of logits that is given with it."""
        began_at = time.perf_counter()
        places = [row for _, row in rows]
        each_row = logits if places == list(range(len(logits))) else logits[places]
        choices = choose_all(each_row, [branch.sampler for branch, _ in rows], [branch.made for branch, _ in rows])
        done_at = time.perf_counter()
        for (branch, _), choice, row in zip(rows, choices, each_row, strict=True):
            if not branch.made:
                timings, sequence = branch.completion.timings, _sequence(branch)
                timings.hash_s, timings.acquire_s, timings.reserve_s = sequence.hash_s, sequence.acquire_s, sequence.reserve_s
                timings.sample_s, timings.ttft_s = done_at - began_at, done_at - branch.job.began_at
                if self.options.keep_logits:
                    branch.completion.first_logits = row.clone()
            self._take(branch, choice)

    def _take(self, branch: Branch, choice: Choice) -> None:
        """Add a token; ends the branch where it was the last."""
        request = branch.job.request
        branch.made.append(choice.token)
        _sequence(branch).append(choice.token)
        self.counters["made_tokens_total"] += 1
        self._tell(branch, Made(branch.index, choice))
        if choice.token in self._loaded.eos and not request.ignore_eos:
            self._end(branch, Finish.EOS)
        elif len(branch.made) >= request.max_tokens:
            self._end(branch, Finish.LENGTH)

    def _fail(self, branch: Branch, error: KVStoreError) -> None:
        """End a branch that cannot go on; of a prompt that is not computed yet, all."""
        for each in [branch] if branch.job.forked else branch.job.branches:
            self._end(each, Finish.FAILED, error)

    def _end(self, branch: Branch, finish: Finish, error: KVStoreError | None = None) -> None:
        if branch.ended:
            return
        branch.ended = True
        branch.completion.finish, branch.completion.error = finish, error
        self.counters[f"ended_{finish}_total"] += 1
        job = branch.job
        if job.forked or all(each.ended for each in job.branches):  # else the prompt is still being computed for the others
            for each in [branch] if job.forked else job.branches:
                self._let_go(each)
        self._tell(branch, Ended(branch.index, finish, error))

    def _let_go(self, branch: Branch) -> None:
        """Give back what a branch holds, and forget it."""
        self._note_fault(branch)
        if branch.sequence is not None:
            branch.sequence.close()
            branch.sequence = None
        if branch in self._running:
            self._running.remove(branch)
        self._admission.forget(branch)

    def _note_fault(self, branch: Branch) -> None:
        if branch.sequence is not None and branch.sequence.fault is not None and not branch.completion.store_fault:
            branch.completion.store_fault = str(branch.sequence.fault)
            self.counters["store_faults_total"] += 1

    def _tell(self, branch: Branch, event: Event) -> None:
        try:
            branch.job.listener(event)
        except Exception:
            log.exception("a listener raised; its request is cancelled")
            branch.job.listener = _nobody
            self.cancel(branch.job)


def _sequence(branch: Branch) -> PagedSequence:
    """That of a branch that runs."""
    if branch.sequence is None:
        raise InternalFault("a branch that does not run was to be computed; report this")
    return branch.sequence


def _nobody(_: Event) -> None:
    """Nobody listens."""
