"""`kvstore chat`, in this process and with a server, as somebody types it."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from kvstore.cli import chat
from kvstore.cli.chat_peers import Messages, Reply, Show
from kvstore.cli.main import EXIT_FAULT, main
from kvstore.errors import InternalFault
from tests.worker.http.scripted import Running

Typed = Callable[..., None]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Puts lines where they are read from."""

    def put(*lines: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return put


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """A thread for the engine's part."""
    with ThreadPoolExecutor(1) as made:
        yield made


def test_a_conversation_grows_and_is_reset(
    scripted: Running, typed: Typed, pool: ThreadPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    def engine() -> list[str]:
        prompts = []
        for answer in ("Blue", "Green", "Red"):
            taken = scripted.engine.next()
            prompts.append(taken.texts.decoder(skip_special=True)(taken.request.tokens))
            assert taken.request.window == 64
            taken.start(hit_tokens=16)
            taken.say(answer)
            taken.end()
        return prompts

    playing = pool.submit(engine)
    typed("one", "", "two", "/reset", "/nonsense", "three", "/quit", "never")
    assert main(["chat", "--url", scripted.url, "--system", "Be brief.", "--stats", "--seed", "5", "--window", "64"]) == 0
    first, second, third = playing.result()
    assert all(prompt.startswith("system\nBe brief.\nuser\n") for prompt in (first, second, third))
    assert "user\none\nassistant\nBlue\nuser\ntwo\n" in second
    assert "user\nthree\n" in third
    assert "one" not in third
    shown = capsys.readouterr()
    assert shown.out == "Blue\nGreen\nRed\n"
    assert shown.err.count("16 of ") == 3
    assert "/nonsense is no command" in shown.err


def test_a_turn_that_fails_is_forgotten(
    scripted: Running, typed: Typed, pool: ThreadPoolExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    def engine() -> str:
        scripted.engine.next().fail(InternalFault("the step failed"))
        broken = scripted.engine.next()
        broken.say("half")
        broken.fail(InternalFault("broke in the middle"))
        taken = scripted.engine.next()
        taken.say("fine")
        taken.end()
        return taken.texts.decoder()(taken.request.tokens)

    playing = pool.submit(engine)
    typed("one", "two", "three")
    assert main(["chat", "--url", scripted.url]) == 0
    prompt = playing.result()
    assert "three" in prompt
    assert "one" not in prompt
    assert "two" not in prompt
    shown = capsys.readouterr()
    assert shown.out == "\nhalf\nfine\n"
    assert "the step failed" in shown.err
    assert "broke in the middle" in shown.err


class Interrupted:
    """Somebody presses Ctrl-C while it answers."""

    name = "interrupted"

    def __init__(self) -> None:
        self.asked: list[Messages] = []

    def ask(self, messages: Messages, show: Show) -> Reply:
        self.asked.append(list(messages))
        show("ha")
        if len(self.asked) == 1:
            raise KeyboardInterrupt
        return Reply("ha")

    def close(self) -> None:
        pass


def test_an_answer_that_is_stopped_is_forgotten_and_the_conversation_goes_on(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    typed("one", "two")
    partner = Interrupted()
    chat._talk(partner, [], stats=False)
    assert partner.asked == [[{"role": "user", "content": word}] for word in ("one", "two")]
    assert "stopped" in capsys.readouterr().err


def test_the_model_in_this_process_remembers_the_conversation(typed: Typed, capsys: pytest.CaptureFixture[str]) -> None:
    typed("What is the capital of France?", "And of Italy?")
    assert main(["chat", "--listen", "/nowhere/s.sock", "--temperature", "0", "--max-tokens", "7", "--stats"]) == 0
    shown = capsys.readouterr()
    assert ["Paris" in shown.out, "Rome" in shown.out] == [True, True]
    assert "32 of " in shown.err  # two blocks of the first turn's prompt
    assert "going on without" in shown.err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1/v1/", "ftp://127.0.0.1", "http://"])
def test_a_server_that_cannot_be_reached_is_said_so(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url]) == EXIT_FAULT
    assert "kvstore: " in capsys.readouterr().err


@contextlib.contextmanager
def other_server(body: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything with this body: its URL, and the keys that it was sent."""
    keys: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers.get("authorization", ""))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", keys
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"data": []}', b'{"data": [5]}', b"\xff"])
def test_a_server_that_speaks_something_else_is_said_so(body: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with other_server(body) as (url, _):
        assert main(["chat", "--url", url]) == EXIT_FAULT
    assert "OpenAI's API" in capsys.readouterr().err


def test_a_key_is_sent_where_there_is_one(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    typed()
    with other_server(b'{"data": [{"id": "m"}]}') as (url, keys):
        assert main(["chat", "--url", url]) == 0
        for key in ("secret", " secret\n"):
            monkeypatch.setenv("KVSTORE_API_KEY", key)
            assert main(["chat", "--url", url]) == 0
    assert keys == ["", "Bearer secret", "Bearer secret"]
