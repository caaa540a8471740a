"""What becomes of branches: they begin, fork, take tokens, are stopped, and end; and their listeners are told.

A branch runs while it has a sequence and waits while it has none; whoever ends gives back all it held.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import cast

from torch import Tensor

from kvstore.clients.patience import Warnings
from kvstore.errors import InternalFault, KVStoreError
from kvstore.worker.admission import Admission
from kvstore.worker.beams import BeamSearch
from kvstore.worker.branch import Branch, Job
from kvstore.worker.requests import Choice, Ended, Event, Finish, Made, Started
from kvstore.worker.sequences import AnySequence

log = logging.getLogger(__name__)


class Lives:
    """The branches of one engine. `running` those with a sequence, `admission` those that wait; `eos` ends a text."""

    def __init__(self, admission: Admission, eos: Collection[int]) -> None:
        self.running: list[Branch] = []
        self.counters: Counter[str] = Counter()
        self._admission, self._eos = admission, eos
        self._warnings = Warnings(log)
        self._without_store = False  # as was logged last

    def cancel(self, job: Job, branch: int | None = None) -> None:
        """End one branch, or all; of beams always all. No error where it has ended."""
        for each in job.branches if branch is None or job.search else job.branches[branch : branch + 1]:
            self.end(each, Finish.CANCELLED)

    def begin(self, branch: Branch, now: float) -> None:
        """A branch has been admitted, for the first time or again."""
        hit_tokens = sequence_of(branch).hit_tokens
        if branch.job.started:
            self.counters["resumed_hit_tokens_total"] += hit_tokens
            self.counters["resumed_tokens_total"] += branch.stored_tokens
            return
        branch.job.started = True
        branch.completion.hit_tokens = hit_tokens
        self.counters["hit_tokens_total"] += hit_tokens
        self.tell(branch, Started(hit_tokens, now - branch.arrived_at))

    def preempt(self, branch: Branch) -> None:
        """Stop a sequence. Its full blocks are in the store: it goes on from there, as far as they are still to be had then."""
        for each in branch.job.branches if branch.job.search else [branch]:
            if each.sequence is not None:
                self.counters["preemptions_total"] += 1
                self.note_fault(each)
                each.completion.preemptions += 1
                each.stored_tokens = each.sequence.stored_tokens
                each.sequence.close()
                each.sequence = None
                self.running.remove(each)
                self._admission.waiting.append(each)

    def forked(self, branch: Branch) -> list[Branch]:
        """The branches that go on from here: itself, and when it is a prompt that was just computed its other samples."""
        job = branch.job
        if job.forked:
            return [branch]
        job.forked = True
        if job.search:
            return [branch]
        for other in job.branches[1:]:
            if not other.ended:
                other.sequence = sequence_of(branch).fork()
                other.completion.hit_tokens = branch.completion.hit_tokens
                self.running.append(other)
        going = [each for each in job.branches if not each.ended]
        if branch.ended:  # cancelled while its prompt was computed for the others
            self.let_go(branch)
        return going

    def take(self, branch: Branch, choice: Choice) -> None:
        """Add a token; ends the branch where it was the last."""
        request = branch.job.request
        branch.made.append(choice.token)
        sequence_of(branch).append(choice.token)
        self.counters["made_tokens_total"] += 1
        self.tell(branch, Made(branch.index, choice))
        if choice.token in self._eos and not request.ignore_eos:
            self.end(branch, Finish.EOS)
        elif len(branch.made) >= request.max_tokens:
            self.end(branch, Finish.LENGTH)

    def search(self, live: Sequence[Branch], logits: Tensor) -> None:
        """One step of a beam search: logits [beam, vocab] of the beams of one job, in their order."""
        job = live[0].job
        search = cast(BeamSearch, job.search)
        parents = search.advance(logits)
        if not parents:
            self._found(job, search)
            return
        origins = [sequence_of(branch) for branch in live]
        used = [parents.index(parent) == at for at, parent in enumerate(parents)]
        sequences = [origins[parent] if first else origins[parent].fork() for parent, first in zip(parents, used, strict=True)]
        for at, origin in enumerate(origins):
            if at not in parents:
                origin.close()
        for branch in job.branches[len(parents) :]:  # fewer than before, where so many texts have ended
            branch.sequence = None
            if branch in self.running:
                self.running.remove(branch)
        for branch, sequence, tokens in zip(job.branches, sequences, search.tokens, strict=False):
            branch.sequence, branch.completion.tokens = sequence, list(tokens)
            branch.completion.hit_tokens = job.branches[0].completion.hit_tokens
            sequence.append(tokens[-1])
            if branch not in self.running:
                self.running.append(branch)
        self.counters["made_tokens_total"] += len(parents)

    def _found(self, job: Job, search: BeamSearch) -> None:
        """Tell the best texts of a search that is over."""
        for branch, text in zip(job.branches, search.texts, strict=False):
            branch.completion.tokens = text.tokens
            if branch.index < job.request.n:
                for token in text.tokens:
                    self.tell(branch, Made(branch.index, Choice(token)))
            self.end(branch, Finish.EOS if text.ended else Finish.LENGTH)
        for branch in job.branches:  # where a vocabulary has fewer continuations than there are beams
            self.end(branch, Finish.LENGTH)

    def fail(self, branch: Branch, error: KVStoreError) -> None:
        """End a branch that cannot go on; of beams, or of a prompt that is not computed yet, all."""
        for each in [branch] if branch.job.forked and not branch.job.search else branch.job.branches:
            self.end(each, Finish.FAILED, error)

    def end(self, branch: Branch, finish: Finish, error: KVStoreError | None = None) -> None:
        """A branch is over: it gives back what it holds, and its listener is told. No error where it was."""
        if branch.ended:
            return
        branch.ended = True
        branch.completion.finish, branch.completion.error = finish, error
        job = branch.job
        if job.forked or all(each.ended for each in job.branches):  # else the prompt is still being computed for the others
            for each in [branch] if job.forked else job.branches:
                self.let_go(each)
        if branch.index < job.request.n:
            self.counters[f"ended_{finish}_total"] += 1
            self.tell(branch, Ended(branch.index, finish, error))

    def let_go(self, branch: Branch) -> None:
        """Give back what a branch holds, and forget it."""
        self.note_fault(branch)
        if branch.sequence is not None:
            branch.sequence.close()
            branch.sequence = None
        if branch in self.running:
            self.running.remove(branch)
        self._admission.forget(branch)

    def note_fault(self, branch: Branch) -> None:
        """Keep what kept a branch from using the store, before its sequence is gone."""
        if branch.sequence is None:
            return
        if branch.sequence.fault is not None and not branch.completion.store_fault:
            branch.completion.store_fault = str(branch.sequence.fault)
            self.counters["store_faults_total"] += 1
            self._without_store |= self._warnings.say("a request goes on without the store", branch.sequence.fault)
        elif self._without_store and not branch.completion.store_fault:
            log.info("the store is used again")
            self._without_store = False

    def tell(self, branch: Branch, event: Event) -> None:
        """Call a request's listener; one that raises loses its request."""
        try:
            branch.job.listener(event)
        except Exception:  # the edge to a caller's code, whatever that does
            log.exception("a listener raised; its request is cancelled")
            branch.job.listener = nobody
            self.cancel(branch.job)


def sequence_of(branch: Branch) -> AnySequence:
    """That of a branch that runs."""
    if branch.sequence is None:
        raise InternalFault("a branch that does not run was to be computed; report this")
    return branch.sequence


def nobody(_: Event) -> None:
    """Nobody listens."""
