"""What was asked, as requests to the engine: texts become tokens, and lengths are held against the model's. Takes time for long texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore.errors import InvalidArgument, LimitExceeded
from kvstore.worker.http.asking import Asked, Prompt
from kvstore.worker.http.faults import BadField, NoSuchModel, TooLong
from kvstore.worker.requests import Request
from kvstore.worker.texts import Texts

ENDLESS_TOKENS = 2**31 - 1  # tokens: more than any stream ever makes


@dataclass(frozen=True)
class Prepared:
    """A request to the engine, and the text that comes before its answer: with `echo` the prompt's."""

    request: Request
    before: str = ""


def prepare(asked: Asked, texts: Texts, name: str) -> list[Prepared]:
    """One request a prompt. Raises BadField, TooLong, and NoSuchModel where another model than `name` is asked."""
    if asked.model != name:
        raise NoSuchModel(f"model {asked.model[:200]!r} is not served here; use {name!r}")
    if asked.chat:
        with _blaming("messages"):
            tokens = texts.encode_chat(asked.messages, endless=bool(asked.window))
        return [Prepared(_request(asked, tokens, texts, "messages"))]
    prepared = []
    for prompt in asked.prompts:
        tokens = _tokens(prompt, texts, endless=bool(asked.window))
        before = (prompt if isinstance(prompt, str) else texts.decoder(asked.skip_special)(prompt)) if asked.echo else ""
        prepared.append(Prepared(_request(asked, tokens, texts, "prompt"), before))
    return prepared


def _tokens(prompt: Prompt, texts: Texts, endless: bool) -> list[int]:
    if isinstance(prompt, str):
        with _blaming("prompt"):
            return texts.encode(prompt, endless=endless)
    if prompt and not (min(prompt) >= 0 and max(prompt) < texts.vocabulary):
        raise BadField("prompt", f"prompt has a token id outside 0..{texts.vocabulary - 1}; use the model's own tokenizer")
    return prompt


@contextmanager
def _blaming(param: str) -> Iterator[None]:
    """Says in which field it was that the tokenizer refused something."""
    try:
        yield
    except InvalidArgument as error:
        raise BadField(param, f"{param}: {error}") from error
    except LimitExceeded as error:
        raise TooLong(param, f"{param}: {error}") from error


def _request(asked: Asked, tokens: Sequence[int], texts: Texts, param: str) -> Request:
    if not tokens:
        raise BadField(param, f"{param} is empty; give at least one token")
    room = ENDLESS_TOKENS if asked.window else texts.max_tokens - len(tokens)
    if room < (asked.max_tokens or 1):
        wanted = f" and {asked.max_tokens} to make" if asked.max_tokens else ""
        raise TooLong(param, f"{param} has {len(tokens)} tokens{wanted}, the model takes {texts.max_tokens} in all; shorten either")
    return Request(
        tokens=tokens,
        max_tokens=room if asked.max_tokens is None else asked.max_tokens,
        salt=asked.salt,
        sampling=asked.sampling,
        n=asked.n,
        beams=asked.beams,
        priority=asked.priority,
        ignore_eos=asked.ignore_eos,
        window=asked.window,
        sinks=asked.sinks,
    )
