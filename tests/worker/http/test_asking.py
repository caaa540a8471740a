"""What a request may say, and that everything else is refused by the name of its field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import KVStoreError
from kvstore.worker.http import asking
from kvstore.worker.http.asking import Asked
from kvstore.worker.http.faults import BadField, NoSuchModel, TooLong, body_of, status_of
from kvstore.worker.http.fields import parse
from kvstore.worker.http.prompts import prepare
from kvstore.worker.requests import Sampling
from kvstore.worker.texts import Texts
from tests.worker.unhurried import unhurried

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hello"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}

FOR_BOTH = [
    ("temperature", -1), ("temperature", 3), ("temperature", "hot"), ("temperature", True), ("temperature", 10**400), ("temperature", []),
    ("top_p", 2), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("presence_penalty", 3), ("frequency_penalty", -3), ("seed", 2**70),
    ("seed", "x"), ("n", 0), ("n", 129), ("n", 1e300), ("n", "2"), ("max_tokens", 0), ("max_tokens", 2**40), ("max_tokens", 10**400),
    ("stop", 5), ("stop", ["a"] * 5), ("stop", [""]), ("stop", ["a", 1]), ("stop", "x" * 1001), ("stop", {}), ("model", 5), ("model", ""),
    ("stream", 1), ("stream", "yes"), ("stream_options", {"include_usage": True}), ("stream_options", 5), ("cache_salt", 5),
    ("cache_salt", "\ud800"), ("priority", 2**40), ("priority", "high"), ("logit_bias", {"5": 1}), ("store", True),
    ("repetition_penalty", 1.1), ("ignore_eos", 1), ("beams", -1), ("beams", 129), ("nonsense", 1), ("x" * 5000, 1), ("\ud800", 1),
    ("window", -1), ("sinks", 0), ("sinks", 4),
]  # fmt: skip
FOR_COMPLETIONS = [
    ("prompt", 5), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", 1]), ("prompt", [1.5]), ("prompt", [True]), ("prompt", {}),
    ("prompt", [[1], "a"]), ("prompt", ["a"] * 65), ("logprobs", 21), ("logprobs", True), ("suffix", "x"), ("best_of", 3), ("echo", "x"),
    ("messages", []), ("max_completion_tokens", 4),
]  # fmt: skip
FOR_CHATS = [
    ("messages", []), ("messages", "Hello"), ("messages", ["Hello"]), ("messages", [{"role": "robot", "content": "x"}]),
    ("messages", [{"role": "user"}]), ("messages", [{"role": "user", "content": 5}]), ("messages", [{"content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), ("messages", CHAT["messages"] * 2049),
    ("messages", [{"role": "user", "content": "x", "tool_calls": [{}]}]), ("messages", [{"role": "user", "content": "x", "nonsense": 1}]),
    ("logprobs", 3), ("top_logprobs", 3), ("tools", [{}]), ("response_format", {"type": "json_object"}), ("tool_choice", "required"),
    ("functions", [{}]), ("modalities", ["audio"]), ("prompt", "x"), ("echo", True), ("reasoning_effort", "high"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), FOR_BOTH + FOR_COMPLETIONS)
def test_a_completion_s_wrong_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadField) as refused:
        asking.completion(COMPLETION | {field: value})
    assert refused.value.param.startswith(field[:80].replace("\ud800", "?"))
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(("field", "value"), FOR_BOTH + FOR_CHATS)
def test_a_chat_s_wrong_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadField) as refused:
        asking.chat(CHAT | {field: value})
    assert refused.value.param.startswith(field[:80].replace("\ud800", "?"))
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_what_must_be_there_is_asked_for(missing: str) -> None:
    with pytest.raises(BadField, match=missing) as refused:
        asking.completion({name: value for name, value in COMPLETION.items() if name != missing})
    assert refused.value.param == missing


def test_fields_that_ask_for_nothing_are_taken() -> None:
    neutral: dict[str, Any] = {
        "user": "u", "metadata": {"a": "b"}, "logit_bias": {}, "temperature": None, "tools": [], "tool_choice": "auto",
        "response_format": {"type": "text"}, "store": False, "n": 1.0, "top_k": -1, "stop": None, "service_tier": "auto",
    }  # fmt: skip
    assert asking.chat(CHAT | neutral) == asking.chat(CHAT)


def test_every_setting_arrives() -> None:
    body = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": 1, "frequency_penalty": -1, "seed": 7, "n": 3,
        "stop": ["a", "b"], "cache_salt": "s", "priority": -2, "stream": True, "stream_options": {"include_usage": True},
        "ignore_eos": True, "skip_special_tokens": False, "logprobs": 4, "max_tokens": 9, "echo": False, "best_of": 3,
    }  # fmt: skip
    expected = Asked(
        "m",
        False,
        ["Hello"],
        (),
        9,
        Sampling(0.5, 0.9, 40, 0.05, 1.0, -1.0, 7, 4),
        3,
        0,
        ("a", "b"),
        "s",
        -2,
        ignore_eos=True,
        skip_special=False,
        echo=False,
        stream=True,
        include_usage=True,
    )
    assert asking.completion(COMPLETION | body) == expected
    chat = {name: value for name, value in body.items() if name not in ("logprobs", "echo", "best_of")}
    chat |= {"logprobs": True, "top_logprobs": 4}
    assert asking.chat(CHAT | chat) == replace(expected, chat=True, prompts=(), messages=CHAT["messages"])


def test_defaults_are_openai_s() -> None:
    assert asking.completion(COMPLETION).sampling == Sampling(temperature=1.0)
    assert asking.completion(COMPLETION).max_tokens == 16
    assert asking.chat(CHAT).max_tokens is None
    assert asking.chat(CHAT | {"max_completion_tokens": 5}).max_tokens == 5
    with pytest.raises(BadField):
        asking.chat(CHAT | {"max_completion_tokens": 5, "max_tokens": 6})


def test_beams_are_searched_without_sampling(smol_texts: Texts) -> None:
    asked = asking.completion(COMPLETION | {"beams": 4, "n": 2})
    assert asked.sampling == Sampling()
    (made,) = prepare(asked, smol_texts, "m")
    assert (made.request.beams, made.request.n) == (4, 2)
    for wrong in ({"temperature": 1}, {"logprobs": 1}, {"seed": 1}):
        with pytest.raises(BadField) as refused:
            asking.completion(COMPLETION | {"beams": 4} | wrong)
        assert refused.value.param == "beams"


def test_a_stream_may_be_longer_than_the_model_takes(smol_texts: Texts) -> None:
    prompt = [5] * (smol_texts.max_tokens + 9)
    request = prepare(asking.completion(COMPLETION | {"prompt": prompt, "window": 64, "max_tokens": 10**6}), smol_texts, "m")[0].request
    assert (request.tokens, request.window, request.sinks, request.max_tokens) == (prompt, 64, 4, 10**6)
    long = CHAT | {"messages": [{"role": "user", "content": "word " * 10_000}]}
    with pytest.raises(TooLong):
        prepare(asking.chat(long), smol_texts, "m")
    endless = prepare(asking.chat(long | {"window": 64, "sinks": 1}), smol_texts, "m")[0].request
    assert (len(endless.tokens) > smol_texts.max_tokens, endless.sinks, endless.max_tokens) == (True, 1, 2**31 - 1)
    for more in ({"n": 2}, {"beams": 2}):
        with pytest.raises(BadField, match="one continuation"):
            asking.completion(COMPLETION | {"window": 64} | more)


def test_parts_of_a_message_are_one_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    asked = asking.chat(CHAT | {"messages": [{"role": "developer", "content": parts, "name": "n"}]})
    assert asked.messages == [{"role": "system", "content": "Hello", "name": "n"}]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"5",
        b"null",
        b"\xff\xfe",
        b'{"n": NaN}',
        b'{"n": Infinity}',
        b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b'"a"',
    ],
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadField):
        parse(body)


def test_a_number_past_all_floats_is_refused() -> None:
    with pytest.raises(BadField, match="temperature"):
        asking.completion(COMPLETION | parse(b'{"temperature": 1e999}'))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
names = st.text() | st.sampled_from([*dict(FOR_BOTH), *dict(FOR_COMPLETIONS), *dict(FOR_CHATS), "user", "audio", "logprobs"])


@unhurried
@given(st.dictionaries(names, json_values, max_size=4), st.booleans())
def test_whatever_comes_is_taken_or_refused_with_a_reason(body: dict[str, Any], chat: bool) -> None:
    """Any JSON under the known names: no other kind of exception leaves the reader, and every error can be sent."""
    refused: KVStoreError | None = None
    try:
        asking.chat(CHAT | body) if chat else asking.completion(COMPLETION | body)
    except KVStoreError as error:
        refused = error
    if refused is not None:
        assert status_of(refused) == 400
        assert json.dumps(body_of(refused), ensure_ascii=False).encode()


def test_prompts_become_requests(smol_texts: Texts) -> None:
    hello = smol_texts.encode("Hello")
    for prompt, expected in (("Hello", [hello]), (["Hello", "Hello"], [hello, hello]), (hello, [hello]), ([hello, [5]], [hello, [5]])):
        made = prepare(asking.completion(COMPLETION | {"prompt": prompt, "echo": True}), smol_texts, "m")
        assert [each.request.tokens for each in made] == expected
        assert made[0].before == "Hello"


@pytest.mark.parametrize("prompt", ["", [-1], [10**9], [49152], "a\ud800"])
def test_a_prompt_that_the_model_cannot_read_is_refused(smol_texts: Texts, prompt: Any) -> None:
    with pytest.raises(BadField, match="prompt"):
        prepare(asking.completion(COMPLETION | {"prompt": prompt}), smol_texts, "m")


def test_an_answer_as_long_as_the_model_takes_is_the_most(smol_texts: Texts) -> None:
    prompt = [5] * 8000
    (made,) = prepare(asking.completion(COMPLETION | {"prompt": prompt, "max_tokens": 192}), smol_texts, "m")
    assert made.request.max_tokens == 192
    for wrong in ({"prompt": prompt, "max_tokens": 193}, {"prompt": [5] * 8192}, {"prompt": "word " * 9000}, {"prompt": "x" * 4_000_000}):
        with pytest.raises(TooLong) as refused:
            prepare(asking.completion(COMPLETION | wrong), smol_texts, "m")
        assert body_of(refused.value)["error"]["code"] == "context_length_exceeded"
        assert body_of(refused.value)["error"]["param"] == "prompt"


def test_a_chat_s_answer_may_fill_the_model(smol_texts: Texts) -> None:
    (made,) = prepare(asking.chat(CHAT), smol_texts, "m")
    assert len(made.request.tokens) + made.request.max_tokens == 8192


def test_another_model_is_not_found(smol_texts: Texts) -> None:
    with pytest.raises(NoSuchModel) as refused:
        prepare(asking.chat(CHAT | {"model": "gpt"}), smol_texts, "m")
    assert (status_of(refused.value), body_of(refused.value)["error"]["param"]) == (404, "model")


def test_messages_that_the_template_refuses_are_the_client_s_fault(smol_texts: Texts) -> None:
    with pytest.raises(BadField, match="messages"):
        prepare(asking.chat(CHAT | {"messages": [{"role": "user", "content": "a\ud800"}]}), smol_texts, "m")
