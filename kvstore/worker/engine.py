"""Continuous batching over the paged cache: at every step sequences join and leave, and prompts share steps with those that decode.

One thread calls an engine. `add` takes requests, each `step` computes one forward pass and tells the requests' listeners; `generate`
does both for a caller who wants to wait. `serving.py` runs an engine in a thread of its own.

A step: pulls begin for those that wait (pulls.py) → those whose pull is done and for whom there is room are admitted → tokens are shared
out (scheduler.py) → slots are found, or somebody gives way → forward → full blocks are committed, tokens are chosen and told.
"""

import contextlib
import time
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
from kvstore.worker.beams import BeamSearch
from kvstore.worker.branch import Branch, Completion, Job, Timings
from kvstore.worker.costs import Costs
from kvstore.worker.forward import forward
from kvstore.worker.gpu.device import Gpu, MemoryLost
from kvstore.worker.lives import Lives, nobody, sequence_of
from kvstore.worker.model import LoadedModel
from kvstore.worker.paged import PagedCache
from kvstore.worker.requests import Choice, Finish, Listener, Request, Sampling
from kvstore.worker.sampling import Sampler, choose_all
from kvstore.worker.scheduler import Room, Rules, gives_way, share
from kvstore.worker.streams import Streams

MAX_BATCH_SEQUENCES = 64  # of one call of `generate`
BACKOFF_S = 0.05  # a sequence that got no slots though alone waits so long for others' workers to move on
MOST_STALLS = 40  # times that beams may start again because not all of them got slots, before their request fails
IDLE_WAIT_S = 0.05  # the longest that a step waits for a pull when there is nothing to compute


@dataclass(frozen=True)
class Options:
    """How an engine works.

    patience_s   how long a sequence may wait for slots that only other workers hold, before it fails. 0: not at all
    keep_logits  a completion keeps the logits of its first token
    native       new tokens attend through the CPU kernels where those serve them: faster, and not to the last bit as torch does
    gpu          where the model and the store's blocks are, if not in the host's memory
    """

    rules: Rules = field(default_factory=Rules)
    patience_s: float = 0.0
    keep_logits: bool = True
    native: bool = False
    gpu: Gpu | None = None


class Engine:
    """One model over one store. `close` gives back what it holds and leaves the store open."""

    def __init__(self, loaded: LoadedModel, store: BlockStore, options: Options | None = None) -> None:
        geometry = loaded.geometry(store.geometry.block_tokens)
        if geometry != store.geometry:
            raise GeometryError(f"the store's blocks are {store.geometry}, the model's {geometry}; open it with the model's geometry")
        self.options = options or Options()
        self._loaded = loaded
        self._cache = PagedCache(store, native=self.options.native, gpu=self.options.gpu)
        self._costs = Costs(store.geometry.block_tokens)
        self._store = store
        self._room = Room(self._arena_blocks())
        self._streams = Streams(loaded, self._cache, self._room)
        self._admission = Admission(self._cache, self.options.rules, self._costs, self._room, self._streams)
        self._stood_s = 0.0
        self._lives = Lives(self._admission, loaded.eos)

    def add(self, request: Request, listener: Listener) -> Job:
        """Take a request; later steps serve it. Raises InvalidArgument and LimitExceeded for one that the model cannot serve."""
        self.check(request)
        job = Job(request, listener, fingerprint(self._loaded.identity_for(request.salt)))
        if request.beams:
            job.search = BeamSearch(request.beams, request.max_tokens, () if request.ignore_eos else self._loaded.eos)
        job.branches.extend(Branch(job, index, Sampler(request.sampling, index)) for index in range(request.beams or request.n))
        self._admission.waiting.append(job.branches[0])
        self._lives.counters["requests_total"] += 1
        self._lives.counters["prompt_tokens_total"] += len(request.tokens)
        return job

    def cancel(self, job: Job, branch: int | None = None) -> None:
        """End one branch of a request, or all. No error where it has ended."""
        self._lives.cancel(job, branch)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """The model attends through the paged cache inside. `step` may be called only there, by the same thread."""
        with torch.inference_mode(), attention.paged(self._loaded.model):
            yield

    def step(self) -> bool:
        """One forward pass, where anything is ready for one; whether there is anything left to do."""
        now = time.monotonic()
        self._room.resize(self._arena_blocks())
        self._room.look(self._cache.held_blocks, now)
        for branch in self._admission.look(self._lives.running, now):
            self._lives.running.append(branch)
            self._lives.begin(branch, now)
        try:
            self._advance(now)
        except MemoryLost:
            self._begin_again()
        busy = bool(self._lives.running or self._admission.waiting)
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
        jobs = [self.add(request, nobody) for request in requests]
        try:
            with self.at_work():
                while self.step():
                    pass
        except BaseException:
            self.drop_all()
            raise
        return [[branch.completion for branch in job.branches[: job.request.n]] for job in jobs]

    def check(self, request: Request) -> None:
        """Raises InvalidArgument and LimitExceeded for a request that the model cannot serve."""
        total, vocabulary = len(request.tokens) + request.max_tokens, int(self._loaded.model.config.vocab_size)
        if not len(request.tokens) or request.max_tokens < 1:
            raise InvalidArgument("a request needs at least one token in its prompt, and one to make")
        if request.window:
            self._streams.check(request)
        elif total > self._loaded.max_tokens:
            raise LimitExceeded(f"{total} tokens of prompt and answer, the model takes {self._loaded.max_tokens}; shorten either")
        if min(request.tokens) < 0 or max(request.tokens) >= vocabulary:
            raise InvalidArgument(f"a token id is outside 0..{vocabulary - 1}; use the model's own tokenizer")
        if not 1 <= request.n <= self.options.rules.running:
            raise InvalidArgument(f"n is {request.n}; at most {self.options.rules.running} sequences run at once here")
        if request.beams and not request.n <= request.beams <= self.options.rules.running:
            raise InvalidArgument(f"beams is {request.beams}; give at least n, {request.n}, and at most {self.options.rules.running}")
        if request.beams and request.sampling != Sampling():
            raise InvalidArgument("a beam search draws nothing; leave the sampling settings as they are")

    def drop_all(self, error: KVStoreError | None = None) -> None:
        """End everything at once: as failed, with an error; else as cancelled."""
        for branch in [*self._lives.running, *self._admission.waiting]:
            for each in branch.job.branches:
                self._lives.fail(each, error) if error else self._lives.end(each, Finish.CANCELLED)
        self._cache.pool.give_back()

    @property
    def waiting(self) -> int:
        """How many sequences wait to run. Any thread."""
        return len(self._admission.waiting)

    def figures(self) -> dict[str, float]:
        """Counters and gauges, see `requests.Serving`. Any thread: each number is right, and they may be of different moments."""
        gauges = {
            "running": len(self._lives.running),
            "waiting": len(self._admission.waiting),
            "held_blocks": self._cache.held_blocks,
            "shared_blocks": self._cache.shared_blocks,
            "room_blocks": self._room.blocks,
            "prefill_tokens_per_second": self._costs.compute_tokens_per_s,
            "load_blocks_per_second": self._costs.load_blocks_per_s,
            "waited_for_pulls_seconds_total": self._stood_s,
        }
        return {**gauges, **self._lives.counters}

    def close(self) -> None:
        """End everything. Idempotent."""
        self.drop_all()
        self._admission.close()
        self._cache.close()

    # ----

    def _advance(self, now: float) -> None:
        parts = self._with_slots(share(self._lives.running, self.options.rules), now)
        if parts:
            self._compute(parts)
        elif under_way := self._admission.under_way():
            wait(under_way, IDLE_WAIT_S, return_when=FIRST_COMPLETED)
            self._stood_s += time.monotonic() - now
        else:
            self._stand_still()

    def _begin_again(self) -> None:
        """Blocks of those that run went with a daemon: all of them are stopped, and come back with what the store has then."""
        self._cache.pool.give_back()
        for branch in list(self._lives.running):
            if branch.sequence is not None:
                self._lives.preempt(branch)

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
        there = {branch for branch, _ in ready if branch.sequence is not None}
        # A beam's last token is computed only where all of its mates' are: each has one token to come then.
        return [
            (branch, count) for branch, count in ready
            if branch in there and (count < branch.tokens_to_come or there.issuperset(branch.mates))
        ]  # fmt: skip

    def _stand_still(self) -> None:
        """Nothing can be computed now. Beams of which some wait for slots that the others hold start again together."""
        for branch in list(self._lives.running):
            if branch.sequence is not None and branch.job.search:
                branch.job.stalls += 1
                if branch.job.stalls > MOST_STALLS:
                    self._lives.fail(branch, ResourceExhausted("the store has too few slots for all beams at once; ask for fewer beams"))
                else:
                    self._lives.preempt(branch)
        if self._admission.waiting:
            time.sleep(BACKOFF_S / 4)

    def _arena_blocks(self) -> int:
        """How many blocks the store's arena has room for, as it is now."""
        return len(self._store.arena) // self._store.geometry.slot_bytes

    def _make_room(self, needy: Branch, error: KVStoreError, now: float) -> None:
        """Give something back so that a sequence may have slots: what waiting requests hold; then the last in rank gives way."""
        self._room.refused(self._cache.held_blocks + self._admission.pulled_blocks(), now)
        if self._admission.drop_one_pull():
            return
        victim = gives_way(self._lives.running, needy, self.options.rules)
        if victim is not None:
            self._lives.preempt(victim)
            return
        if dropped := self._cache.pulls.letting_go():
            wait(dropped, IDLE_WAIT_S, return_when=FIRST_COMPLETED)
            return
        if needy.starved_at != sequence_of(needy).computed:
            needy.starved_at = sequence_of(needy).computed
            self._lives.preempt(needy)  # its own copies of blocks that others committed first go, and it comes back with less
            return
        if needy.starved_since is None:
            needy.starved_since = now
        if now - needy.starved_since >= self.options.patience_s:
            self._lives.fail(needy, error)
        else:  # others' workers hold the rest: what this one has may be what they wait for
            self._lives.preempt(needy)
            needy.not_before = now + BACKOFF_S

    def _compute(self, parts: Sequence[tuple[Branch, int]]) -> None:
        """One forward pass, and what follows from it."""
        began_at = time.perf_counter()
        timings = Timings()
        logits = self._forward(parts, timings)
        took_s = time.perf_counter() - began_at
        self._costs.computed(sum(count for _, count in parts), took_s)
        self._lives.counters["steps_total"] += 1
        rows: list[tuple[Branch, int]] = []
        known = 0
        for branch, count in parts:
            mine, sequence = branch.completion.timings, sequence_of(branch)
            if branch.made:
                mine.decode_s += took_s
            else:
                for part in ("gather_s", "write_s", "compute_s"):
                    setattr(mine, part, getattr(mine, part) + getattr(timings, part))
            sequence.advance(count)
            if sequence.computed == len(sequence.tokens):
                rows.extend((each, known) for each in self._lives.forked(branch))
                known += 1
        if rows:
            self._choose(rows, logits)

    def _forward(self, parts: Sequence[tuple[Branch, int]], timings: Timings) -> Tensor:
        """Logits [known, vocab] after the parts whose tokens are all computed then, in their order."""
        return forward(self._loaded, self._cache, [(sequence_of(branch), count) for branch, count in parts], timings)

    def _choose(self, rows: Sequence[tuple[Branch, int]], logits: Tensor) -> None:
        """Choose and tell the next token of each branch, from the row of logits that is given with it."""
        searches: dict[Job, list[tuple[Branch, int]]] = {}
        for branch, row in rows:
            if branch.job.search:
                searches.setdefault(branch.job, []).append((branch, row))
        for beams in searches.values():
            beams.sort(key=lambda each: each[0].index)
            self._lives.search([branch for branch, _ in beams], logits[[row for _, row in beams]])
        if others := [(branch, row) for branch, row in rows if not branch.job.search]:
            self._sample(others, logits)

    def _sample(self, rows: Sequence[tuple[Branch, int]], logits: Tensor) -> None:
        began_at = time.perf_counter()
        places = [row for _, row in rows]
        each_row = logits if places == list(range(len(logits))) else logits[places]
        choices = _chosen([branch for branch, _ in rows], each_row)
        done_at = time.perf_counter()
        for (branch, _), choice, row in zip(rows, choices, each_row, strict=True):
            if branch.ended:  # another branch's listener raised, which ended them all
                continue
            if isinstance(choice, KVStoreError):
                self._lives.fail(branch, choice)
                continue
            if not branch.made:
                timings, sequence = branch.completion.timings, sequence_of(branch)
                timings.hash_s, timings.acquire_s, timings.reserve_s = sequence.hash_s, sequence.acquire_s, sequence.reserve_s
                timings.sample_s, timings.ttft_s = done_at - began_at, done_at - branch.job.began_at
                if self.options.keep_logits:
                    branch.completion.first_logits = row.clone()
            self._lives.take(branch, choice)


def _chosen(branches: Sequence[Branch], rows: Tensor) -> list[Choice | KVStoreError]:
    """The next token of each branch; for a row that has no numbers what is wrong with it, and the others go on."""
    try:
        return list(choose_all(rows, [branch.sampler for branch in branches], [branch.made for branch in branches]))
    except InternalFault:
        return [_chosen_alone(branch, row) for branch, row in zip(branches, rows, strict=True)]


def _chosen_alone(branch: Branch, row: Tensor) -> Choice | KVStoreError:
    try:
        return branch.sampler.choose(row, branch.made)
    except InternalFault as error:
        return error
