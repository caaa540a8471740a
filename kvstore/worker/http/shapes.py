"""Answers in OpenAI's JSON: whole ones, and the pieces of a stream; for completions and for chats."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.worker.answering import Told
from kvstore.worker.http.asking import Asked
from kvstore.worker.texts import Texts

DONE = b"data: [DONE]\n\n"  # what ends a stream that had no fault
_LEAST_LOGPROB = -9999.0  # what OpenAI writes for a token that cannot be: JSON has no infinity


@dataclass
class Collected:
    """All of one choice, for an answer that is sent at once."""

    text: str = ""
    tokens: list[Told] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True)
class Counted:
    """Tokens of a request: of its prompts, those of them that came from the store, and made."""

    prompt: int
    cached: int
    made: int

    def json(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.made,
            "total_tokens": self.prompt + self.made,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Shapes:
    """The JSON of one request's answer. `name` is the model's, as it was asked for."""

    def __init__(self, asked: Asked, texts: Texts, name: str) -> None:
        self._asked, self._texts = asked, texts
        kind = "chat.completion" if asked.chat else "text_completion"
        self._kind, self._piece_kind = kind, f"{kind}.chunk" if asked.chat else kind
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": name,
        }

    def whole(self, choices: Sequence[Collected], counted: Counted) -> dict[str, Any]:
        """An answer that is sent at once."""
        shaped = []
        for index, choice in enumerate(choices):
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            content = {"message": message} if self._asked.chat else {"text": choice.text}
            shaped.append({"index": index, **content, "logprobs": self._logprobs(choice.tokens), "finish_reason": choice.reason})
        return {**self._head, "object": self._kind, "choices": shaped, "usage": counted.json()}

    def first(self, index: int, text: str) -> bytes | None:
        """What comes before a choice's first piece: a chat's role, or the prompt that is repeated."""
        if self._asked.chat:
            return self._event([{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}])
        return self.piece(index, text, (), "") if text else None

    def piece(self, index: int, text: str, tokens: Sequence[Told], reason: str) -> bytes:
        """More of a choice; with `reason` its last."""
        content: dict[str, Any] = {"delta": {"content": text} if text or tokens else {}} if self._asked.chat else {"text": text}
        return self._event([{"index": index, **content, "logprobs": self._logprobs(tokens), "finish_reason": reason or None}])

    def usage(self, counted: Counted) -> bytes:
        """The piece after the last, with the counts."""
        return event({**self._head, "object": self._piece_kind, "choices": [], "usage": counted.json()})

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        usage = {"usage": None} if self._asked.include_usage else {}
        return event({**self._head, "object": self._piece_kind, "choices": choices, **usage})

    def _logprobs(self, tokens: Sequence[Told]) -> dict[str, Any] | None:
        if self._asked.sampling.logprobs < 0 or not tokens:
            return None
        return self._chat_logprobs(tokens) if self._asked.chat else self._completion_logprobs(tokens)

    def _chat_logprobs(self, tokens: Sequence[Told]) -> dict[str, Any]:
        content = []
        for told in tokens:
            top = [self._chat_token(token, logprob) for token, logprob in told.choice.top]
            content.append({**self._chat_token(told.choice.token, told.choice.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _chat_token(self, token: int, logprob: float | None) -> dict[str, Any]:
        piece = self._texts.piece(token)
        return {"token": piece.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(piece)}

    def _completion_logprobs(self, tokens: Sequence[Told]) -> dict[str, Any]:
        return {
            "tokens": [self._name(told.choice.token) for told in tokens],
            "token_logprobs": [_finite(told.choice.logprob) for told in tokens],
            "top_logprobs": [{self._name(token): _finite(value) for token, value in _likely(told)} for told in tokens],
            "text_offset": [told.offset for told in tokens],
        }

    def _name(self, token: int) -> str:
        """A token as text; one that is a part of a character only by its bytes, as OpenAI does: names must differ."""
        piece = self._texts.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _likely(told: Told) -> Iterable[tuple[int, float]]:
    """The likeliest tokens, and the chosen one where it is not among them."""
    yield from told.choice.top
    if told.choice.logprob is not None and told.choice.token not in {token for token, _ in told.choice.top}:
        yield told.choice.token, told.choice.logprob


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST_LOGPROB)
