"""The openai client against `kvstore worker`: a real process with the real model, over a real daemon."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from kvstore.cli.main import EXIT_FAULT, main
from tests.worker.http.conftest import MODEL, RUNNING, Worker
from tests.worker.http.scripted import WAIT_S

STORY = "The old lighthouse keeper climbed the stairs every evening. He counted the steps, and he wrote the number into a book. " * 6
QUESTION = [{"role": "user", "content": "Name the capital of France in one short sentence."}]


@pytest.fixture(scope="module")
def client(worker: Worker) -> Any:
    """A client of the real worker."""
    return worker.client()


def figure(worker: Worker, name: str) -> float:
    """One of the worker's metrics."""
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=WAIT_S) as answer:
        lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
    return float(lines.get(name, 0.0))


def until(true: Callable[[], bool]) -> None:
    """Wait for what must come true."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        if true():
            return
        pause.wait(0.05)
    raise AssertionError("it never came true")


def test_the_model_is_listed(client: Any) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kvstore"


def test_a_prompt_comes_from_the_store_the_second_time(client: Any) -> None:
    asked = {"model": MODEL, "prompt": STORY, "max_tokens": 4, "temperature": 0}
    first, second, third = (client.completions.create(**asked) for _ in range(3))
    prompt_tokens = first.usage.prompt_tokens
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == (prompt_tokens - 1) // 16 * 16
    assert (second.usage.completion_tokens, second.usage.total_tokens) == (4, prompt_tokens + 4)
    assert second.choices[0].text == third.choices[0].text  # the first one's bits differ a little: nothing of it came from the store


def test_a_salt_shares_with_nobody_else(client: Any) -> None:
    asked = {"model": MODEL, "prompt": STORY + "Salted.", "max_tokens": 1}
    hits = [
        client.completions.create(**asked, extra_body={"cache_salt": salt}).usage.prompt_tokens_details.cached_tokens > 0
        for salt in ("one", "one", "two")
    ]
    assert hits == [False, True, False]


def test_a_conversation_is_answered_whole_and_in_pieces(client: Any) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 8}
    client.chat.completions.create(**asked)  # from now on each finds the same blocks, and computes the same
    whole = client.chat.completions.create(**asked)
    assert "Paris" in whole.choices[0].message.content
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].delta.content or "" for each in pieces if each.choices) == whole.choices[0].message.content
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert pieces[-1].usage == whole.usage


def test_a_stop_string_ends_the_text_before_it(client: Any) -> None:
    asked = {"model": MODEL, "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 12}  # shorter than a block: always computed alike
    free = client.completions.create(**asked).choices[0].text
    assert " 6, 7" in free
    stopped = client.completions.create(**asked, stop=["6, 7", "never"])
    assert stopped.choices[0].text == free[: free.index("6, 7")]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens < 12


def test_samples_of_one_prompt_differ_and_their_seed_repeats_them(client: Any) -> None:
    asked = {"model": MODEL, "prompt": "My favourite animal is", "n": 4, "temperature": 1.5, "max_tokens": 5}
    runs = [[each.text for each in client.completions.create(**asked, seed=seed).choices] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert len(set(runs[0])) > 1


def test_the_best_texts_of_a_beam_search_are_the_answer(client: Any) -> None:
    asked = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 3, "n": 2, "extra_body": {"beams": 3}}
    answer = client.completions.create(**asked)
    texts = [each.text for each in answer.choices]
    assert len(set(texts)) == 2
    assert any("Paris" in text for text in texts)


def test_a_stream_goes_on_past_its_window_and_takes_nothing_from_the_store(client: Any) -> None:
    for _ in range(2):
        more = {"window": 24, "sinks": 2, "ignore_eos": True}
        done = client.completions.create(model=MODEL, prompt="The sea is " * 20, max_tokens=12, temperature=0, extra_body=more)
        assert (done.usage.completion_tokens, done.usage.prompt_tokens_details.cached_tokens) == (12, 0)
    with pytest.raises(openai.BadRequestError, match="the model takes"):
        client.completions.create(model=MODEL, prompt="The sea is " * 20, extra_body={"window": 9000})


def test_logprobs_are_those_of_the_text(client: Any) -> None:
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 4}
    choice = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert "".join(each.token for each in content) == choice.message.content
    for each in content:
        assert each.logprob == each.top_logprobs[0].logprob <= 0
        assert len(each.top_logprobs) == 3


@pytest.mark.parametrize(
    ("wrong", "error", "param"),
    [
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"prompt": "word " * 9000}, openai.BadRequestError, "prompt"),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense"),
        ({"n": RUNNING + 1}, openai.BadRequestError, None),
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
    ],
    ids=["value", "too long", "unknown field", "more than run at once", "unknown model"],
)
def test_what_is_wrong_is_the_client_s_kind_of_error(client: Any, wrong: dict[str, Any], error: type[openai.APIError], param: str) -> None:
    with pytest.raises(error) as refused:
        client.completions.create(**{"model": MODEL, "prompt": "x", "max_tokens": 1} | wrong)
    assert refused.value.param == param


def test_a_closed_stream_frees_everything(worker: Worker, client: Any) -> None:
    stream = client.completions.create(model=MODEL, prompt=STORY, max_tokens=5000, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    assert figure(worker, "kvstore_engine_held_blocks") > 0
    stream.close()
    until(lambda: figure(worker, "kvstore_engine_held_blocks") == figure(worker, "kvstore_engine_running") == 0)
    until(lambda: figure(worker, 'kvstore_worker_requests_total{path="/v1/completions",status="499"}') >= 1)
    assert figure(worker, "kvstore_worker_open_requests") == 0
    assert client.completions.create(model=MODEL, prompt="Still there", max_tokens=1).choices


def test_past_its_queue_a_worker_says_come_later(worker: Worker, client: Any) -> None:
    asked = {"model": MODEL, "prompt": "Once", "max_tokens": 4000, "stream": True, "extra_body": {"ignore_eos": True}}
    running = client.completions.create(**asked, n=RUNNING)
    next(running)  # from now on whoever comes waits
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.completions.create, **asked)
        until(lambda: figure(worker, "kvstore_engine_waiting") == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(**asked)
        assert refused.value.response.headers["retry-after"] == "1"
        running.close()
        stream = waiting.result(WAIT_S)
        assert next(stream).choices
        stream.close()


def test_only_whoever_has_the_key_is_served(worker: Worker) -> None:
    with pytest.raises(openai.AuthenticationError):
        worker.client("another").models.list()


def test_without_a_daemon_the_worker_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--listen", "/nowhere/s.sock"]) == EXIT_FAULT
    assert "--standalone" in capsys.readouterr().err


def test_at_its_end_answers_are_interrupted_and_nobody_is_there(worker: Worker, client: Any) -> None:
    """The last one: it ends the worker that the others use."""
    asked = {"model": MODEL, "prompt": "Once", "max_tokens": 4000, "stream": True, "extra_body": {"ignore_eos": True}}
    running = client.completions.create(**asked)
    next(running)
    worker.process.terminate()
    with pytest.raises(openai.APIError, match="the server is ending"):
        list(running)
    assert worker.process.wait(WAIT_S) == 0
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
