"""The real server and the real openai client, before an engine that says what each test tells it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from kvstore.errors import InternalFault, LimitExceeded, ResourceExhausted, Unavailable
from kvstore.worker.engine import Engine
from kvstore.worker.http.app import Settings
from kvstore.worker.http.server import Ending
from kvstore.worker.model import LoadedModel
from kvstore.worker.requests import Finish
from kvstore.worker.serving import EngineThread
from kvstore.worker.texts import Texts
from tests.worker.http.conftest import MODEL, client_of
from tests.worker.http.scripted import WAIT_S, Running, Taken, running
from tests.worker.stores import small_store

HELLO: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
PROMPT: Any = {"model": MODEL, "prompt": "Hello"}


@pytest.fixture
def asking() -> Iterator[ThreadPoolExecutor]:
    """A thread in which a client waits."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


def raw(server: Running, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    """A request without a client's help."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=WAIT_S)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def test_pieces_come_as_they_are_made(scripted: Running, client: Any, asking: ThreadPoolExecutor) -> None:
    opened = asking.submit(client.chat.completions.create, **HELLO, stream=True, stream_options={"include_usage": True})
    taken = scripted.engine.next()
    taken.start(hit_tokens=16)
    taken.say("Good")
    stream = opened.result(WAIT_S)
    assert next(stream).choices[0].delta.role == "assistant"
    assert next(stream).choices[0].delta.content == "Good"
    taken.say(" morning")  # only now, so that the first piece cannot have waited for it
    assert next(stream).choices[0].delta.content == " morning"
    taken.end()
    last, usage = list(stream)
    assert (last.choices[0].finish_reason, last.usage) == ("stop", None)
    assert usage.usage.prompt_tokens_details.cached_tokens == 16
    assert usage.usage.completion_tokens == 2


def test_a_stop_string_ends_the_branch_in_the_engine_too(scripted: Running, client: Any, asking: ThreadPoolExecutor) -> None:
    waiting = asking.submit(client.completions.create, **PROMPT, stop=["STOP", "\n\n"], n=2, logprobs=0)
    taken = scripted.engine.next()
    taken.start()
    taken.say("one ST", 0)
    taken.say("OP two", 0)
    assert taken.cancels.get(timeout=WAIT_S) == 0
    taken.end(Finish.CANCELLED, 0)
    taken.say("three S", 1)
    taken.end(Finish.LENGTH, 1)
    answer = waiting.result(WAIT_S)
    assert [(each.text, each.finish_reason) for each in answer.choices] == [("one ", "stop"), ("three S", "length")]
    first, second = (each.logprobs.tokens for each in answer.choices)
    assert "".join(second) == "three S"
    assert "".join(first).startswith("one ")
    assert "STOP" not in "".join(first)


def test_choices_of_several_prompts_are_numbered_in_order(scripted: Running, client: Any, asking: ThreadPoolExecutor) -> None:
    waiting = asking.submit(client.completions.create, model=MODEL, prompt=["a", "b"], n=2, echo=True)
    for letter in ("x", "y"):
        taken = scripted.engine.next()
        taken.start(1)
        for branch in (1, 0):
            taken.say(f" {letter}{branch}", branch)
            taken.end(Finish.EOS, branch)
    answer = waiting.result(WAIT_S)
    assert [each.text for each in answer.choices] == ["a x0", "a x1", "b y0", "b y1"]
    assert [each.index for each in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == answer.usage.prompt_tokens_details.cached_tokens == 2


def test_an_echoed_prompt_begins_each_stream(scripted: Running, client: Any, asking: ThreadPoolExecutor) -> None:
    opened = asking.submit(client.completions.create, model=MODEL, prompt=["a", "b"], echo=True, stream=True)
    for _ in range(2):
        taken = scripted.engine.next()
        taken.say("!")
        taken.end()
    texts = ["", ""]
    for piece in opened.result(WAIT_S):
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == ["a!", "b!"]


def test_logprobs_come_in_both_shapes(scripted: Running, client: Any, asking: ThreadPoolExecutor) -> None:
    def told(taken: Taken) -> None:
        taken.say("Hi 你")
        taken.end()

    waiting = asking.submit(client.completions.create, **PROMPT, logprobs=2)
    told(scripted.engine.next())
    shape = waiting.result(WAIT_S).choices[0].logprobs
    assert shape.tokens[0] == "Hi"
    assert all(name.startswith("bytes:") for name in shape.tokens[2:])
    assert shape.text_offset[:2] == [0, 2]
    assert shape.top_logprobs[0] == {"Hi": -0.5, "Q": -1.5}
    waiting = asking.submit(client.chat.completions.create, **HELLO, logprobs=True, top_logprobs=2)
    told(scripted.engine.next())
    content = waiting.result(WAIT_S).choices[0].logprobs.content
    assert b"".join(bytes(each.bytes) for each in content) == "Hi 你".encode()
    assert [(each.token, each.logprob) for each in content[0].top_logprobs] == [("Hi", -0.5), ("Q", -1.5)]


@pytest.mark.parametrize(
    ("refusal", "error", "status"),
    [
        (ResourceExhausted("256 requests wait"), openai.RateLimitError, 429),
        (LimitExceeded("too long"), openai.BadRequestError, 400),
        (Unavailable("stopping"), openai.InternalServerError, 503),
        (ZeroDivisionError("secret"), openai.InternalServerError, 500),
    ],
)
def test_what_the_engine_refuses_has_its_status(
    scripted: Running, client: Any, refusal: BaseException, error: type[openai.APIStatusError], status: int
) -> None:
    scripted.engine.refusal = refusal
    with pytest.raises(error) as refused:
        client.chat.completions.create(**HELLO, stream=True)
    assert refused.value.status_code == status
    assert ("retry-after" in refused.value.response.headers) == (status in (429, 503))
    assert "secret" not in str(refused.value)


def test_of_several_prompts_all_are_taken_or_none(scripted: Running, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, submit = scripted.engine, scripted.engine.submit

    def once(*given: Any) -> Taken:
        taken = submit(*given)
        engine.refusal = ResourceExhausted("full")
        return taken

    monkeypatch.setattr(engine, "submit", once)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model=MODEL, prompt=["a", "b"])
    assert engine.next().cancels.get(timeout=WAIT_S) is None


def test_a_server_whose_engine_is_ill_is_not_healthy(own: Running) -> None:
    assert raw(own, "GET", "/health")[0] == 200
    own.engine.illness = "the engine has ended"
    status, body, _ = raw(own, "GET", "/health")
    assert (status, json.loads(body)) == (503, {"status": "the engine has ended"})
    own.engine.illness = ""
    assert raw(own, "GET", "/health")[0] == 200


def test_a_real_engine_that_hangs_shows_in_health_and_metrics_until_it_goes_on(smol_texts: Texts, tiny: LoadedModel) -> None:
    serving = EngineThread(Engine(tiny, small_store(tiny)), stuck_s=0.05)
    go_on = threading.Event()

    def hold(_: Engine) -> None:
        go_on.wait(WAIT_S)

    with running(smol_texts, Settings(MODEL), Ending(deadline_s=WAIT_S), serving) as server:
        _until(lambda: raw(server, "GET", "/health")[0] == 200)
        serving.ask(hold)
        _until(lambda: raw(server, "GET", "/health")[0] == 503)
        assert b"the engine has been at one step for" in raw(server, "GET", "/health")[1]
        assert b"kvstore_engine_healthy 0.0" in raw(server, "GET", "/metrics")[1]
        go_on.set()
        _until(lambda: raw(server, "GET", "/health")[0] == 200)
        _until(lambda: b"kvstore_engine_healthy 1.0" in raw(server, "GET", "/metrics")[1])
        serving.close()
        assert raw(server, "GET", "/health")[:2] == (503, b'{"status":"the engine has ended"}')


def test_a_fault_before_the_first_token_has_a_status(scripted: Running, client: Any, asking: ThreadPoolExecutor) -> None:
    for stream in (False, True):
        waiting = asking.submit(client.chat.completions.create, **HELLO, stream=stream, n=2)
        scripted.engine.next().fail(InternalFault("the step failed"))
        with pytest.raises(openai.InternalServerError, match="the step failed"):
            waiting.result(WAIT_S)


def test_a_fault_in_the_middle_ends_a_stream_with_an_error(scripted: Running, client: Any, asking: ThreadPoolExecutor) -> None:
    opened = asking.submit(client.completions.create, **PROMPT, stream=True)
    taken = scripted.engine.next()
    taken.say("one")
    taken.fail(InternalFault("the step failed"))
    stream = opened.result(WAIT_S)
    assert next(stream).choices[0].text == "one"
    with pytest.raises(openai.APIError, match="the step failed"):
        list(stream)


def test_a_client_that_closes_its_stream_ends_the_request(scripted: Running, client: Any, asking: ThreadPoolExecutor) -> None:
    opened = asking.submit(client.completions.create, **PROMPT, stream=True)
    taken = scripted.engine.next()
    taken.say("one")
    opened.result(WAIT_S).close()
    assert taken.cancels.get(timeout=WAIT_S) is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_ends_the_request(scripted: Running, stream: bool) -> None:
    connection = http.client.HTTPConnection(scripted.url.removeprefix("http://"), timeout=WAIT_S)
    connection.request("POST", "/v1/completions", json.dumps(PROMPT | {"stream": stream}))
    taken = scripted.engine.next()
    connection.close()
    assert taken.cancels.get(timeout=WAIT_S) is None


def test_special_tokens_show_only_where_they_are_asked_for(scripted: Running, client: Any, asking: ThreadPoolExecutor) -> None:
    for skip, expected in ((True, "ab"), (False, "a<|im_start|>b")):
        waiting = asking.submit(client.completions.create, **PROMPT, extra_body={"skip_special_tokens": skip})
        taken = scripted.engine.next()
        taken.say("a<|im_start|>b")
        taken.end()
        assert waiting.result(WAIT_S).choices[0].text == expected


def test_only_whoever_has_the_key_is_served(smol_texts: Texts) -> None:
    with running(smol_texts, Settings(MODEL, api_key="right"), Ending(WAIT_S)) as server:
        for key in ("wrong", "rightly", "réght"):
            status, body, _ = raw(server, "GET", "/v1/models", authorization=f"Bearer {key}")
            assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError):
            client_of(server, "wrong").models.list()
        assert client_of(server, "right").models.list().data[0].id == MODEL
        assert raw(server, "GET", "/health")[0] == 200


def test_a_body_past_the_limit_is_refused_unread(smol_texts: Texts) -> None:
    with running(smol_texts, Settings(MODEL, max_body_bytes=1000), Ending(WAIT_S)) as server:
        body = json.dumps(PROMPT | {"prompt": "x" * 2000}).encode()
        assert raw(server, "POST", "/v1/completions", body)[0] == 413
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=WAIT_S)
        connection.request("POST", "/v1/completions", iter([body[:600], body[600:]]), {"Transfer-Encoding": "chunked"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"model": NaN}', b"[]", b'{"model": "\\ud800", "prompt": "x"}', b'{"\\ud800": 1}'])
def test_a_body_that_is_no_request_is_a_typed_error(scripted: Running, body: bytes) -> None:
    status, answer, _ = raw(scripted, "POST", "/v1/completions", body)
    assert status in (400, 404)
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/x/y", 404)]
)
def test_what_is_not_there_is_an_error_of_the_same_kind(scripted: Running, method: str, path: str, status: int) -> None:
    answered, body, _ = raw(scripted, method, path)
    assert answered == status
    assert json.loads(body)["error"]["message"]


def test_metrics_count_requests_tokens_and_times(own: Running, asking: ThreadPoolExecutor) -> None:
    client: Any = client_of(own)
    waiting = asking.submit(client.completions.create, **PROMPT)
    taken = own.engine.next()
    taken.start(hit_tokens=1)
    taken.say("one two three")
    taken.end()
    waiting.result(WAIT_S)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(**PROMPT | {"model": "other"})
    status, body, headers = raw(own, "GET", "/metrics")
    lines = set(body.decode().splitlines())
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert {
        'kvstore_worker_requests_total{path="/v1/completions",status="200"} 1.0',
        'kvstore_worker_requests_total{path="/v1/completions",status="404"} 1.0',
        'kvstore_worker_tokens_total{kind="prompt"} 1.0',
        'kvstore_worker_tokens_total{kind="cached"} 1.0',
        'kvstore_worker_tokens_total{kind="made"} 3.0',
        "kvstore_worker_first_token_seconds_count 1.0",
        "kvstore_worker_next_token_seconds_count 2.0",
        "kvstore_worker_open_requests 0.0",
        "kvstore_engine_running 2.0",
        "kvstore_engine_steps_total 31.0",
    } <= lines


def test_on_a_signal_answers_become_whole_and_others_are_sent_away(own: Running, asking: ThreadPoolExecutor) -> None:
    client: Any = client_of(own)
    waiting = asking.submit(client.chat.completions.create, **HELLO)
    taken = own.engine.next()
    taken.say("one")
    own.signal()
    _until(lambda: raw(own, "GET", "/health")[0] == 503)
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(**HELLO)
    assert refused.value.status_code == 503
    taken.say(" two")
    taken.end()
    assert waiting.result(WAIT_S).choices[0].message.content == "one two"
    own.thread.join(WAIT_S)
    assert not own.thread.is_alive()
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_an_answer_that_does_not_end_in_time_is_interrupted(smol_texts: Texts, asking: ThreadPoolExecutor) -> None:
    with running(smol_texts, Settings(MODEL), Ending(deadline_s=0.2)) as server:
        client: Any = client_of(server)
        opened = asking.submit(client.completions.create, **PROMPT, stream=True)
        taken = server.engine.next()
        taken.say("one")
        stream = opened.result(WAIT_S)
        server.signal()
        assert taken.cancels.get(timeout=WAIT_S) is None
        taken.end(Finish.CANCELLED)
        with pytest.raises(openai.APIError, match="the server is ending"):
            list(stream)
        server.thread.join(WAIT_S)
        assert not server.thread.is_alive()


def _until(true: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if true():
            return
        pause.wait(0.01)
    raise AssertionError("it never came true")
