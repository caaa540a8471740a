"""The mixed load as a client sends it and hears its answers: streams over HTTP, each in a thread, timed piece by piece."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvstore.errors import Unavailable

SILENCE_S = 600.0  # seconds that a server may be silent: far beyond what any of this takes


@dataclass(frozen=True)
class Asked:
    """A request of the load. `kind`: `talk` has a short prompt and a long answer, `read` the other way round."""

    kind: str
    at_s: float
    tokens: list[int]
    answer_tokens: int


@dataclass
class Heard:
    """Its answer. `pieces_at_s` has when each piece of text came, in seconds from the beginning of the load, as `asked.at_s`."""

    asked: Asked
    pieces_at_s: list[float] = field(default_factory=list)
    text: str = ""
    made_tokens: int = 0
    cached_tokens: int = 0


def send(url: str, model: str, load: Sequence[Asked]) -> list[Heard]:
    """Send each request when its time has come, and wait for all answers. Raises Unavailable where one is refused or breaks off."""
    began_at = time.perf_counter()
    with ThreadPoolExecutor(len(load)) as pool:
        return list(pool.map(lambda asked: _answer(url, model, asked, began_at), load))


def _answer(url: str, model: str, asked: Asked, began_at: float) -> Heard:
    heard = Heard(asked)
    body = {
        "model": model, "prompt": asked.tokens, "max_tokens": asked.answer_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    time.sleep(max(0.0, began_at + asked.at_s - time.perf_counter()))
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SILENCE_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Unavailable(f"{url} answered with status {answer.status}: {answer.read()[:300].decode(errors='replace')}")
        for line in answer:
            now_s = time.perf_counter() - began_at
            if line.startswith(b"data: {"):
                _take(heard, json.loads(line.removeprefix(b"data: ")), now_s)
            elif line.startswith(b"data: [DONE]"):
                return heard
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"{url}: {error}") from error
    finally:
        connection.close()
    raise Unavailable(f"{url}: an answer broke off")


def _take(heard: Heard, piece: dict[str, object], now_s: float) -> None:
    if "error" in piece:
        raise Unavailable(f"an answer failed: {piece['error']}")
    choices = piece.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if choice["text"]:
            heard.pieces_at_s.append(now_s)
            heard.text += choice["text"]
    usage = piece.get("usage")
    if isinstance(usage, dict):
        heard.made_tokens = int(usage["completion_tokens"])
        heard.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
