"""What a request asks, as one typed value for both kinds: checked field by field, before anything is turned into tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstore.errors import InvalidArgument
from kvstore.worker import sampling as sampler
from kvstore.worker.http.faults import BadField
from kvstore.worker.http.fields import Fields
from kvstore.worker.requests import DEFAULT_SINKS, Sampling

MAX_STOPS = 4  # stop strings: OpenAI's limit
MAX_STOP_LETTERS = 1000  # letters: each token's text is compared with all beginnings of a stop string
MAX_BRANCHES = 128  # samples of one prompt: OpenAI's limit
MAX_PROMPTS = 64  # prompts in one request
MAX_MESSAGES = 2048  # messages in one conversation
DEFAULT_COMPLETION_TOKENS = 16  # tokens: OpenAI's default for completions; a chat's answer may be as long as the model takes
_MOST_PRIORITY = 100  # levels: each is worth some seconds of waiting, and nobody is to be first for ever
_MOST = 2**31 - 1  # tokens: more than any model takes
# Fields that say who asks and why, and nothing about the answer.
_IGNORED = (
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls",
)  # fmt: skip
# Fields for what is not served, with the values that do not ask for it.
_NEUTRAL: dict[str, Sequence[Any]] = {
    "logit_bias": ({},), "store": (False,), "repetition_penalty": (1, 1.0), "length_penalty": (1, 1.0),
}  # fmt: skip
_NEUTRAL_COMPLETION: dict[str, Sequence[Any]] = {"suffix": ("",)}
_NEUTRAL_CHAT: dict[str, Sequence[Any]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],),
    "response_format": ({"type": "text"},), "audio": (), "prediction": (), "reasoning_effort": ("none",), "web_search_options": (),
    "verbosity": (), "moderation": (),
}  # fmt: skip

_GREEDY = Sampling()
Prompt = str | list[int]


@dataclass(frozen=True)
class Asked:
    """A request. A chat has `messages`, a completion `prompts`; `max_tokens` None: as many as fit; `window`: see `Request`."""

    model: str
    chat: bool
    prompts: Sequence[Prompt] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    sampling: Sampling = _GREEDY
    n: int = 1
    beams: int = 0
    stop: Sequence[str] = ()
    salt: str = ""
    priority: int = 0
    ignore_eos: bool = False
    window: int = 0
    sinks: int = DEFAULT_SINKS
    skip_special: bool = True
    echo: bool = False
    stream: bool = False
    include_usage: bool = False


def completion(values: Mapping[str, Any]) -> Asked:
    """A body of /v1/completions. Raises BadField."""
    fields = Fields(values)
    prompts = _prompts(fields.raw("prompt"))
    logprobs = fields.integer("logprobs", None, 0, sampler.MAX_LOGPROBS)
    asked = replace(
        _common(fields, -1 if logprobs is None else logprobs),
        prompts=prompts,
        echo=fields.flag("echo"),
        max_tokens=fields.integer("max_tokens", DEFAULT_COMPLETION_TOKENS, 1, _MOST),
    )
    best_of = fields.integer("best_of", None, 1, _MOST)
    if best_of not in (None, asked.n):
        raise BadField("best_of", f"best_of {best_of} is not served, n is {asked.n}; leave it out and take n answers")
    if asked.echo and logprobs is not None:
        raise BadField("echo", "echo with logprobs is not served: a prompt that comes from the store has none; leave out one of them")
    fields.only_neutral(_NEUTRAL_COMPLETION)
    fields.end()
    return asked


def chat(values: Mapping[str, Any]) -> Asked:
    """A body of /v1/chat/completions. Raises BadField."""
    fields = Fields(values)
    messages = _messages(fields)
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", None, 0, sampler.MAX_LOGPROBS)
    if top is not None and not wanted:
        raise BadField("top_logprobs", "top_logprobs needs logprobs: true beside it")
    older, newer = (fields.integer(name, None, 1, _MOST) for name in ("max_tokens", "max_completion_tokens"))
    if older is not None and newer is not None and older != newer:
        raise BadField("max_tokens", f"max_tokens {older} and max_completion_tokens {newer} say different things; give one of them")
    asked = replace(
        _common(fields, (top or 0) if wanted else -1),
        chat=True,
        messages=messages,
        max_tokens=newer if older is None else older,
    )
    fields.only_neutral(_NEUTRAL_CHAT)
    fields.end()
    return asked


def _common(fields: Fields, logprobs: int) -> Asked:
    """What both kinds have."""
    model = fields.text("model")
    if not model:
        raise BadField("model", "model is missing; GET /v1/models says which is served")
    stream = fields.flag("stream")
    options = fields.inner("stream_options")
    include_usage = options.flag("include_usage")
    options.ignore(["include_obfuscation"])
    options.end()
    if include_usage and not stream:
        raise BadField("stream_options", "stream_options needs stream: true beside it")
    fields.ignore(_IGNORED)
    fields.only_neutral(_NEUTRAL)
    beams = fields.integer("beams", 0, 0, MAX_BRANCHES) or 0
    n = fields.integer("n", 1, 1, MAX_BRANCHES) or 1
    window, sinks = fields.integer("window", 0, 0, _MOST) or 0, fields.integer("sinks", None, 1, _MOST)
    if sinks is not None and not window:
        raise BadField("sinks", "sinks needs window beside it")
    if window and (beams or n > 1):
        raise BadField("window", "a stream (window) has one continuation; leave out n and beams, or window")
    return Asked(
        model=model,
        chat=False,
        sampling=_sampling(fields, logprobs, beams),
        n=n,
        beams=beams,
        stop=_stops(fields),
        salt=_salt(fields),
        priority=fields.integer("priority", 0, -_MOST_PRIORITY, _MOST_PRIORITY) or 0,
        ignore_eos=fields.flag("ignore_eos"),
        window=window,
        sinks=DEFAULT_SINKS if sinks is None else sinks,
        skip_special=fields.flag("skip_special_tokens", True),
        stream=stream,
        include_usage=include_usage,
    )


def _sampling(fields: Fields, logprobs: int, beams: int) -> Sampling:
    top_k = fields.integer("top_k", 0, -1, _MOST) or 0
    asked = Sampling(
        temperature=fields.number("temperature", 0.0 if beams else 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=max(top_k, 0),  # -1 is how some clients say all
        min_p=fields.number("min_p", 0.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        seed=fields.integer("seed", None, -(2**63), 2**63 - 1),
        logprobs=logprobs,
    )
    try:
        sampler.check(asked)
    except InvalidArgument as error:
        raise BadField(str(error).split(" ", 1)[0], str(error)) from error
    if beams and asked != _GREEDY:
        raise BadField("beams", "a beam search takes no sampling settings and tells no logprobs; leave them out, or beams")
    return asked


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        fields.wrong("stop", value, f"a text, or up to {MAX_STOPS} in a list")
    if len(stops) > MAX_STOPS:
        raise BadField("stop", f"stop has {len(stops)} texts; give at most {MAX_STOPS}")
    if not all(0 < len(stop) <= MAX_STOP_LETTERS for stop in stops):
        raise BadField("stop", f"a text of stop is empty, or longer than {MAX_STOP_LETTERS} letters; give shorter ones")
    return tuple(stops)


def _salt(fields: Fields) -> str:
    salt = fields.text("cache_salt", "") or ""
    try:
        salt.encode()
    except UnicodeEncodeError:
        fields.wrong("cache_salt", salt, "a text of whole characters")
    return salt


def _prompts(value: Any) -> list[Prompt]:
    """The four forms: a text, texts, tokens, lists of tokens."""
    if value is None:
        raise BadField("prompt", "prompt is missing; give a text, token ids, or a list of either")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        Fields({}).wrong("prompt", value, "a text, token ids, or a list of either that is not empty")
    if _are_tokens(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise BadField("prompt", f"prompt has {len(value)} prompts; send at most {MAX_PROMPTS} at a time")
    if all(isinstance(each, str) for each in value) or all(isinstance(each, list) and each and _are_tokens(each) for each in value):
        return value
    raise BadField("prompt", "prompt is a list of mixed or wrong things; give a text, texts, token ids, or lists of token ids")


def _are_tokens(value: list[Any]) -> bool:
    return all(type(each) is int for each in value)


def _messages(fields: Fields) -> list[dict[str, Any]]:
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        fields.wrong("messages", value, "a list of messages that is not empty")
    if len(value) > MAX_MESSAGES:
        raise BadField("messages", f"messages has {len(value)} of them; send at most {MAX_MESSAGES}")
    return [_message(each, f"messages[{at}]") for at, each in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadField(where, f"{where} is no object; give role and content")
    fields = Fields(value, f"{where}.")
    role = fields.text("role")
    if role not in ("system", "developer", "user", "assistant"):
        fields.wrong("role", role, '"system", "developer", "user" or "assistant"')
    content = fields.raw("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    if not isinstance(content, str):
        fields.wrong("content", content, "a text, or a list of parts of type text")
    message = {"role": "system" if role == "developer" else role, "content": content}
    name = fields.text("name")
    fields.only_neutral({"refusal": (), "tool_calls": ([],), "function_call": (), "audio": (), "annotations": ([],)})
    fields.end()
    return message if name is None else message | {"name": name}


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict) or value.get("type") != "text" or not isinstance(value.get("text"), str):
        raise BadField(where, f"{where} is not of type text; this model reads texts only")
    return str(value["text"])
