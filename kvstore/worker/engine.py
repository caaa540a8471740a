"""Greedy generation over the paged cache: each prompt's prefill, then all sequences decoded together, one token a step.

The projections of a step run over the whole batch, its attention sequence by sequence. One thread.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

import torch
from torch import Tensor

from kvstore.clients.blocks import BlockStore
from kvstore.errors import GeometryError, InvalidArgument, KVStoreError, LimitExceeded
from kvstore.hashing import fingerprint
from kvstore.worker import attention
from kvstore.worker.model import LoadedModel
from kvstore.worker.paged import PagedCache, PagedSequence

MAX_BATCH_SEQUENCES = 64  # decoded together; each holds its whole context in the store meanwhile


@dataclass(frozen=True)
class Request:
    """A prompt to continue greedily until the model ends the text or `max_tokens` are made."""

    tokens: Sequence[int]
    max_tokens: int
    salt: str = ""


class Finish(StrEnum):
    """Why a completion ended."""

    EOS = "eos"
    LENGTH = "length"
    FAILED = "failed"


@dataclass
class Timings:
    """Where one sequence's time to the first token went. `ttft_s` counts from the call, other prompts of the batch included."""

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
    """What became of one request. `error` with FAILED: the tokens made before it are right, and there are no more.

    hit_tokens      prompt tokens whose KV came from the store      store_fault     why the store was not used to the end, "" if it was
    first_logits    [vocab] of the first token
    """

    tokens: list[int] = field(default_factory=list)
    finish: Finish = Finish.LENGTH
    hit_tokens: int = 0
    store_fault: str = ""
    error: KVStoreError | None = None
    first_logits: Tensor | None = None
    timings: Timings = field(default_factory=Timings)


@dataclass
class _Active:
    sequence: PagedSequence
    request: Request
    completion: Completion


class Engine:
    """One model over one store. `close` gives back what it holds and leaves the store open."""

    def __init__(self, loaded: LoadedModel, store: BlockStore) -> None:
        geometry = loaded.geometry(store.geometry.block_tokens)
        if geometry != store.geometry:
            raise GeometryError(f"the store's blocks are {store.geometry}, the model's {geometry}; open it with the model's geometry")
        self._loaded = loaded
        self._cache = PagedCache(store)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete all requests, in their order. A request that fails on the way says so in its completion, and the others go on.

        Raises InvalidArgument and LimitExceeded for requests that no model could serve, before any work.
        """
        self._check(requests)
        began_at = time.perf_counter()
        completions = [Completion() for _ in requests]
        running: list[_Active] = []
        try:
            with torch.inference_mode(), attention.paged(self._loaded.model):
                for request, completion in zip(requests, completions, strict=True):
                    self._prefill(request, completion, running, began_at)
                while running:
                    self._decode(running)
        finally:
            for active in running:
                active.sequence.close()
        return completions

    def close(self) -> None:
        """End everything. Idempotent."""
        self._cache.close()

    def _prefill(self, request: Request, completion: Completion, running: list[_Active], began_at: float) -> None:
        root = fingerprint(self._loaded.identity_for(request.salt))
        sequence = self._cache.open(request.tokens, root)
        active = _Active(sequence, request, completion)
        running.append(active)
        completion.hit_tokens = sequence.hit_tokens
        count = len(sequence.tokens) - sequence.computed
        try:
            sequence.ensure(count)
        except KVStoreError as error:
            self._end(active, running, error)
            return
        timings = completion.timings
        timings.hash_s, timings.acquire_s, timings.reserve_s = sequence.hash_s, sequence.acquire_s, sequence.reserve_s
        logits = self._forward([active], count, timings)
        sampled_at = time.perf_counter()
        completion.first_logits = logits[0]
        token = choose(logits)[0]
        done_at = time.perf_counter()
        timings.sample_s, timings.ttft_s = done_at - sampled_at, done_at - began_at
        sequence.advance(count)
        self._take(active, token, running)

    def _decode(self, running: list[_Active]) -> None:
        """One token for every running sequence."""
        began_at = time.perf_counter()
        for active in list(running):
            try:
                active.sequence.ensure(1)
            except KVStoreError as error:
                self._end(active, running, error)
        if not running:
            return
        batch = list(running)
        tokens = choose(self._forward(batch, 1, Timings()))
        took_s = time.perf_counter() - began_at
        for active, token in zip(batch, tokens, strict=True):
            active.completion.timings.decode_s += took_s
            active.sequence.advance(1)
            self._take(active, token, running)

    def _forward(self, batch: Sequence[_Active], count: int, timings: Timings) -> Tensor:
        """Logits [batch, vocab] after the next `count` tokens of each sequence."""
        began_at = time.perf_counter()
        sequences = [active.sequence for active in batch]
        step = self._cache.step([(sequence, count) for sequence in sequences])
        tokens = [token for sequence in sequences for token in sequence.tokens[sequence.computed : sequence.computed + count]]
        positions = [place for sequence in sequences for place in range(sequence.computed, sequence.computed + count)]
        last = torch.tensor([span.at + span.count - 1 for span in step.spans])
        model = cast(Any, self._loaded.model)
        out = model(
            input_ids=torch.tensor([tokens]), position_ids=torch.tensor([positions]), use_cache=False, logits_to_keep=last, paged_step=step
        )
        timings.gather_s, timings.write_s = step.gather_s, step.write_s
        timings.compute_s = time.perf_counter() - began_at - step.gather_s - step.write_s
        return cast(Tensor, out.logits[0])

    def _take(self, active: _Active, token: int, running: list[_Active]) -> None:
        """Add a sampled token; ends the sequence where it was the last."""
        completion = active.completion
        completion.tokens.append(token)
        active.sequence.append(token)
        if token in self._loaded.eos:
            completion.finish = Finish.EOS
        elif len(completion.tokens) < active.request.max_tokens:
            return
        self._end(active, running)

    def _end(self, active: _Active, running: list[_Active], error: KVStoreError | None = None) -> None:
        completion, fault = active.completion, active.sequence.fault
        if error is not None:
            completion.finish, completion.error = Finish.FAILED, error
        completion.store_fault = str(fault) if fault else ""
        active.sequence.close()
        running.remove(active)

    def _check(self, requests: Sequence[Request]) -> None:
        if len(requests) > MAX_BATCH_SEQUENCES:
            raise LimitExceeded(f"{len(requests)} sequences in one batch, the most is {MAX_BATCH_SEQUENCES}; send fewer at a time")
        vocabulary = int(self._loaded.model.config.vocab_size)
        for request in requests:
            total = len(request.tokens) + request.max_tokens
            if not request.tokens or request.max_tokens < 1:
                raise InvalidArgument("a request needs at least one token in its prompt, and one to make")
            if total > self._loaded.max_tokens:
                raise LimitExceeded(f"{total} tokens of prompt and answer, the model takes {self._loaded.max_tokens}; shorten either")
            if min(request.tokens) < 0 or max(request.tokens) >= vocabulary:
                raise InvalidArgument(f"a token id is outside 0..{vocabulary - 1}; use the model's own tokenizer")


def choose(logits: Tensor) -> list[int]:
    """The likeliest token of each row of logits [batch, vocab]."""
    return cast(list[int], logits.float().argmax(dim=-1).tolist())
