"""What a client reads of an answer, made of the engine's events: text in pieces, why each branch ended, what was counted.

No I/O, no clock, no thread of its own: whoever owns an `Answer` hands it events one at a time and sends on what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.errors import InternalFault, KVStoreError, Unavailable
from kvstore.worker.detokenizing import Detokenizer, Stops
from kvstore.worker.requests import Choice, Ended, Event, Finish, Made, Started
from kvstore.worker.texts import Texts


class Reason(StrEnum):
    """Why a branch's text ends, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Wanted:
    """What of an answer is told: `stop` strings end it and do not show; `logprobs` tells tokens with their log-probabilities."""

    stop: Sequence[str] = ()
    skip_special: bool = True
    logprobs: bool = False


@dataclass(frozen=True)
class Told:
    """A token with its log-probability; `offset` is where its text begins in its branch's text, in letters."""

    choice: Choice
    offset: int


@dataclass(frozen=True)
class Delta:
    """More of a branch. `reason` with its last; "" before that. `cancel`: the engine is still at it and should stop."""

    branch: int
    text: str = ""
    tokens: Sequence[Told] = ()
    reason: str = ""
    cancel: bool = False


@dataclass
class _Branch:
    detokenizer: Detokenizer
    stops: Stops
    reason: str = ""
    out: int = 0  # letters that went out
    seen: int = 0  # letters of all tokens so far, those held back included
    waiting: tuple[Told, ...] = ()  # tokens of text that is held back


class Answer:
    """The branches of one request's answer. `error` is set where it failed; nothing comes after that."""

    def __init__(self, texts: Texts, prompt: Sequence[int], branches: int, wanted: Wanted) -> None:
        decode = texts.decoder(wanted.skip_special)
        self._branches = [_Branch(Detokenizer(decode, prompt), Stops(wanted.stop)) for _ in range(branches)]
        self._wanted = wanted
        self._skipped = texts.ending if wanted.skip_special else frozenset()
        self.prompt_tokens = len(prompt)
        self.hit_tokens = 0
        self.made_tokens = 0
        self.queued_s = 0.0
        self.error: KVStoreError | None = None

    @property
    def done(self) -> bool:
        """Whether every branch has its end."""
        return all(branch.reason for branch in self._branches)

    def take(self, event: Event) -> Delta | None:
        """The next event; returns what a client may be told of it."""
        if isinstance(event, Started):
            self.hit_tokens, self.queued_s = event.hit_tokens, event.queued_s
            return None
        branch = self._branches[event.branch]
        if branch.reason or self.error:
            return None
        return self._made(event, branch) if isinstance(event, Made) else self._ended(event, branch)

    def _made(self, event: Made, branch: _Branch) -> Delta | None:
        self.made_tokens += 1
        told = Told(event.choice, branch.seen)
        text = branch.detokenizer.add(event.choice.token)
        branch.seen += len(text)
        if self._wanted.logprobs and event.choice.token not in self._skipped:
            branch.waiting += (told,)
        return self._out(event.branch, branch, branch.stops.add(text))

    def _ended(self, event: Ended, branch: _Branch) -> Delta | None:
        if event.finish in (Finish.FAILED, Finish.CANCELLED):
            self.error = event.error or _unasked(event.finish)
            return None
        rest = branch.detokenizer.end()
        branch.seen += len(rest)
        text = branch.stops.add(rest)
        if not branch.stops.found:
            text += branch.stops.end()
            branch.reason = Reason.STOP if event.finish is Finish.EOS else Reason.LENGTH
        return self._out(event.branch, branch, text, ended=True)

    def _out(self, index: int, branch: _Branch, text: str, *, ended: bool = False) -> Delta | None:
        """The text, with the tokens that begin in it."""
        branch.out += len(text)
        cut = branch.stops.found
        if cut:
            branch.reason = Reason.STOP
        everything = bool(branch.reason) and not cut
        tokens = tuple(told for told in branch.waiting if everything or told.offset < branch.out)
        branch.waiting = branch.waiting[len(tokens) :]
        if not text and not tokens and not branch.reason:
            return None
        return Delta(index, text, tokens, branch.reason, cancel=cut and not ended)


def _unasked(finish: Finish) -> KVStoreError:
    if finish is Finish.CANCELLED:
        return Unavailable("the answer was interrupted because the server is ending; send the request again later")
    return InternalFault("the engine failed; its log says why")
