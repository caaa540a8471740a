"""Whom `kvstore chat` talks with: a server over HTTP, or a model in this process. No command of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvstore.cli.api_key import api_key
from kvstore.cli.urls import server_url
from kvstore.errors import (
    ConfigError,
    InvalidArgument,
    KVStoreError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)

SILENCE_S = 300.0  # seconds that a server may be silent: a long prompt before it may take so long on a processor without a GPU
Messages = Sequence[Mapping[str, str]]
Show = Callable[[str], None]


@dataclass(frozen=True)
class Wishes:
    """How answers are to be made. `window`: 0, or the conversation is a stream without an end (docs/models.md)."""

    temperature: float
    max_tokens: int
    seed: int | None = None
    window: int = 0


@dataclass
class Reply:
    """An answer, and what it took: tokens of the prompt, those of them that came from the store, made; seconds to the first and last."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    made_tokens: int = 0
    first_s: float = 0.0
    took_s: float = 0.0


class Partner(Protocol):
    """Whoever answers."""

    name: str

    def ask(self, messages: Messages, show: Show) -> Reply:
        """The answer to a conversation; `show` is given its text as it comes. Raises KVStoreError."""

    def close(self) -> None:
        """Leave."""


def over_http(url: str, wishes: Wishes) -> Partner:
    """A server that speaks OpenAI's chat completions, with the first model that it lists. Raises Unavailable, InvalidArgument."""
    return _Server(url, wishes)


def in_process(model: Path | None, address: str | None, wishes: Wishes, note: Show) -> Partner:
    """A model in this process, on the daemon's store, or where none answers on memory of its own, which `note` is told."""
    try:
        from kvstore.worker.http.main import Plan, build
    except ModuleNotFoundError as error:
        raise ConfigError(f"a model in this process needs {error.name}; pip install 'kvstore[worker]', or give --url") from error
    built = build(Plan(model, address, or_alone=True))
    if built.why_alone:
        note(f"{built.why_alone}; going on without the daemon's store")
    return _Local(built, wishes)


class _Local:
    def __init__(self, built: Any, wishes: Wishes) -> None:
        self._built, self._wishes = built, wishes
        self.name = built.texts.name

    def ask(self, messages: Messages, show: Show) -> Reply:
        from kvstore.worker.answering import Answer, Wanted
        from kvstore.worker.requests import Event, Request, Sampling

        texts, began_at, reply = self._built.texts, time.perf_counter(), Reply()
        wishes = self._wishes
        tokens = texts.encode_chat(messages, endless=bool(wishes.window))
        room = wishes.max_tokens if wishes.window else texts.max_tokens - len(tokens)
        if room < 1:
            raise InvalidArgument(f"the conversation has {len(tokens)} tokens, the model takes {texts.max_tokens}; /reset begins a new one")
        answer = Answer(texts, tokens, 1, Wanted())
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        sampling = Sampling(temperature=wishes.temperature, seed=wishes.seed)
        request = Request(tokens, min(room, wishes.max_tokens), sampling=sampling, window=wishes.window)
        ticket = self._built.serving.submit(request, events.put)
        try:
            while not answer.done:
                delta = answer.take(events.get())
                if answer.error is not None:
                    raise answer.error
                if answer.made_tokens == 1 and not reply.first_s:
                    reply.first_s = time.perf_counter() - began_at
                if delta is not None and delta.text:
                    reply.text += delta.text
                    show(delta.text)
        finally:
            ticket.cancel()
        reply.prompt_tokens, reply.cached_tokens, reply.made_tokens = answer.prompt_tokens, answer.hit_tokens, answer.made_tokens
        reply.took_s = time.perf_counter() - began_at
        return reply

    def close(self) -> None:
        self._built.close()


class _Server:
    def __init__(self, url: str, wishes: Wishes) -> None:
        parts = server_url(url, ("http", "https"))
        self._parts, self._url, self._wishes, self._key = parts, url, wishes, api_key()
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        with self._opened("GET", "/v1/models") as answer:
            self.name = str(json.load(answer)["data"][0]["id"])

    def ask(self, messages: Messages, show: Show) -> Reply:
        wishes, began_at, reply = self._wishes, time.perf_counter(), Reply()
        body = {
            "model": self.name, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True},
            "temperature": wishes.temperature, "max_tokens": wishes.max_tokens,
        } | ({} if wishes.seed is None else {"seed": wishes.seed}) | ({"window": wishes.window} if wishes.window else {})  # fmt: skip
        with self._opened("POST", "/v1/chat/completions", json.dumps(body).encode()) as answer:
            for piece in _events(answer):
                if "error" in piece:
                    raise Unavailable(str(piece["error"].get("message", piece["error"])))
                for choice in piece.get("choices", ()):
                    text = choice["delta"].get("content") or ""
                    reply.first_s = reply.first_s or (time.perf_counter() - began_at if text else 0.0)
                    reply.text += text
                    show(text)
                _count(reply, piece.get("usage") or {})
        reply.took_s = time.perf_counter() - began_at
        return reply

    def close(self) -> None:
        """Nothing is kept open between two turns."""

    @contextlib.contextmanager
    def _opened(self, method: str, path: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.netloc, timeout=SILENCE_S)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        try:
            connection.request(method, self._base + path, body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise _fault(answer.status, answer.read())
            yield answer
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            misread = isinstance(error, (json.JSONDecodeError, LookupError, TypeError, AttributeError))
            why = "its answer is none of OpenAI's API" if misread else str(error) or type(error).__name__
            raise Unavailable(f"server {self._url}: {why}; see that it runs and speaks OpenAI's API") from error
        finally:
            connection.close()


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events, to the end that the server marks."""
    for line in answer:
        text = line.decode().strip()
        if text == "data: [DONE]":
            return
        if text.startswith("data: "):
            yield json.loads(text.removeprefix("data: "))
    raise ValueError("the answer broke off")


def _count(reply: Reply, usage: Mapping[str, Any]) -> None:
    reply.prompt_tokens = usage.get("prompt_tokens", reply.prompt_tokens)
    reply.made_tokens = usage.get("completion_tokens", reply.made_tokens)
    reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", reply.cached_tokens)


def _fault(status: int, body: bytes) -> KVStoreError:
    try:
        text = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")[:200] or "no reason given"
    kinds: dict[int, type[KVStoreError]] = {401: PermissionDenied, 404: NotFound, 429: ResourceExhausted, 400: InvalidArgument}
    return kinds.get(status, Unavailable)(f"{text} (status {status})")
