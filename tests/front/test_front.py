"""The front door before real workers of both roles over one daemon: the answers of one worker alone, whoever dies."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from kvstore.cli.main import main
from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.model import load_model
from kvstore.worker.plain import generate_plain
from tests.worker.little import save_little_llama

WAIT_S = 60.0  # for what must come; a busy machine takes its time
BLOCK_TOKENS = 16  # tokens of a block in a worker
MAX_TOKENS = 24


class Process:
    """`kvstore` with some arguments as a process of its own, ready."""

    def __init__(self, *words: str) -> None:
        program = [sys.executable, "-c", "from kvstore.cli.main import main; raise SystemExit(main())"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        self.process = subprocess.Popen([*program, *words], stdout=subprocess.PIPE, text=True, env=inherited | {"OMP_NUM_THREADS": "1"})

    def wait(self) -> str:
        """Its URL, once it says that it is ready."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        return "http://" + line.partition("http://")[2].partition("/v1")[0]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End it whatever it does."""
        self.kill()
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama in fp32 with a real tokenizer."""
    return save_little_llama(tmp_path_factory.mktemp("models") / "little", 64, 3, 4, 2, 2048)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, str]:
    """What transformers alone makes of the prompts, by their seeds."""
    loaded = load_model(folder)
    assert loaded.tokenizer is not None
    made = {seed: generate_plain(loaded, prompt(seed), MAX_TOKENS).tokens for seed in range(8)}
    return {seed: str(loaded.tokenizer.decode(tokens, skip_special_tokens=True)) for seed, tokens in made.items()}


def prompt(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(100, 40_000, (331 + seed,), generator=generator)]


class Fleet:
    """A daemon, a prefill and a decode worker, and the front door before them and before `others`, which come first."""

    def __init__(self, folder: Path, others: Sequence[str] = ()) -> None:
        self.daemon = DaemonProcess(dram="64MiB", nvme=False).start()
        common = ("worker", "--model", str(folder), "--listen", self.daemon.address, "--http", "127.0.0.1:0", "--role")
        self.prefill, self.decode = Process(*common, "prefill"), Process(*common, "decode")
        urls = [self.prefill.wait(), self.decode.wait()]
        words = [word for url in others for word in ("--decode", url)]
        self.front = Process("front", "--http", "127.0.0.1:0", "--prefill", urls[0], *words, "--decode", urls[1])
        self.url = self.front.wait()
        self.client: Any = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)

    def ask(self, seed: int, **more: Any) -> Any:
        asked = {"model": "little", "prompt": prompt(seed), "max_tokens": MAX_TOKENS, "temperature": 0}
        return self.client.completions.create(**asked | more)

    def figures(self) -> dict[str, float]:
        """The front door's metrics, those of workers by role and outcome."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=WAIT_S) as answer:
            lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
        found: dict[str, float] = {}
        for name, value in lines:
            kept = [part for part in name.rstrip("}").replace("{", ",").split(",") if not part.startswith("worker=")]
            found[" ".join(kept)] = found.get(" ".join(kept), 0.0) + float(value)
        return found

    def close(self) -> None:
        for process in (self.front, self.prefill, self.decode):
            process.close()
        self.daemon.close()


class Breaking:
    """A worker that breaks: well to look at, it answers requests with what a test says, once it may, and hangs up."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.says = b""
        self._answering = threading.Thread(target=self._run, daemon=True)
        self._answering.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                if _received(connection).startswith(b"GET /health"):
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                else:
                    self.asked += 1
                    self.may_answer.wait(WAIT_S)
                    connection.sendall(self.says)

    def close(self) -> None:
        """Answer nobody from here on. Closing alone would let the accept that is under way take one more."""
        self.may_answer.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._answering.join(WAIT_S)


def _received(connection: socket.socket) -> bytes:
    """A whole request: what is left unread would take the answer with it."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += connection.recv(1 << 16)
    head, _, body = got.partition(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    while len(body) < size:
        body += connection.recv(1 << 16)
    return got


@pytest.fixture(scope="module")
def breaking() -> Iterator[Breaking]:
    made = Breaking()
    yield made
    made.close()


@pytest.fixture(scope="module")
def fleet(folder: Path, alone: dict[int, str], breaking: Breaking) -> Iterator[Fleet]:
    made = Fleet(folder, [breaking.url])
    breaking.says = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}"
    yield made
    made.close()


def text_of(stream: Any) -> str:
    return "".join(piece.choices[0].text for piece in stream if piece.choices)


def test_a_prompt_is_computed_by_one_worker_and_continued_by_another(fleet: Fleet, alone: dict[int, str]) -> None:
    done = fleet.ask(0)
    assert done.choices[0].text == alone[0]
    assert done.usage.prompt_tokens_details.cached_tokens == (331 - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert text_of(fleet.ask(1, stream=True)) == alone[1]
    figures = fleet.figures()
    assert figures['kvstore_front_sent_total outcome="200" role="prefill"'] == 2
    assert figures['kvstore_front_sent_total outcome="200" role="decode"'] == 2


def test_a_short_prompt_and_a_wrong_request_take_no_prefill(fleet: Fleet) -> None:
    name = 'kvstore_front_sent_total outcome="200" role="prefill"'
    before = fleet.figures().get(name, 0)
    fleet.client.completions.create(model="little", prompt="Hello", max_tokens=2)
    with pytest.raises(openai.BadRequestError):
        fleet.client.completions.create(model="little", prompt="Hello", max_tokens=0)
    assert [model.id for model in fleet.client.models.list().data] == ["little"]
    assert fleet.figures().get(name, 0) == before


def test_a_stream_is_computed_by_whom_it_is_made(fleet: Fleet) -> None:
    name = 'kvstore_front_sent_total outcome="200" role="prefill"'
    before = fleet.figures().get(name, 0)
    assert fleet.ask(7, extra_body={"window": 64}).usage.prompt_tokens_details.cached_tokens == 0
    assert fleet.figures().get(name, 0) == before


def test_a_conversation_in_the_terminal_goes_through_the_front_door(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = 'kvstore_front_sent_total outcome="200" role="prefill"'
    before = fleet.figures().get(name, 0)
    monkeypatch.setattr("sys.stdin", io.StringIO("Tell me about the sea. " * 30 + "\nAnd about its fish?\n/quit\n"))
    assert main(["chat", "--url", fleet.url, "--temperature", "0", "--max-tokens", "6", "--stats"]) == 0
    shown = capsys.readouterr()
    first, second = [[int(count) for count in pair] for pair in re.findall(r"(\d+) of (\d+) prompt tokens", shown.err)]
    assert [cached for cached, _ in (first, second)] == [(tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS for _, tokens in (first, second)]
    assert second[1] > first[1] > 8 * BLOCK_TOKENS, "the second turn has the first before it"
    assert fleet.figures()[name] == before + 2
    assert len(shown.out.splitlines()) == 2


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_that_breaks_before_its_answer_is_followed_by_another(
    fleet: Fleet, breaking: Breaking, alone: dict[int, str], says: bytes, stream: bool
) -> None:
    breaking.says = says
    until_all_are_up(fleet)
    done = fleet.ask(2, stream=stream)
    assert (text_of(done) if stream else done.choices[0].text) == alone[2]


def until_all_are_up(fleet: Fleet) -> None:
    """Wait until the front door has seen that the breaking worker is well again."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        with urllib.request.urlopen(f"{fleet.url}/health", timeout=WAIT_S) as answer:
            if all(each["up"] for each in json.load(answer)["workers"]):
                return
        pause.wait(0.05)
    raise AssertionError("it never came back")


def test_a_stream_whose_worker_dies_ends_with_an_error_and_no_wrong_token(fleet: Fleet, breaking: Breaking) -> None:
    event = b'data: {"choices": [{"index": 0, "text": "right"}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    breaking.says = head + b"%x\r\n%s\r\n" % (len(event), event)
    until_all_are_up(fleet)
    stream = iter(fleet.ask(3, stream=True))
    assert next(stream).choices[0].text == "right"
    with pytest.raises(openai.APIError, match="what came before is right"):
        next(stream)
    assert fleet.figures()['kvstore_front_sent_total outcome="broken" role="decode"'] == 1


def test_a_worker_that_is_late_is_said_so_and_nobody_else_does_the_work_again() -> None:
    with closing(Breaking()) as busy, closing(Breaking()) as other:
        busy.may_answer.clear()
        words = ("front", "--http", "127.0.0.1:0", "--decode", busy.url, "--decode", other.url, "--first-s", "0.3")
        with closing(Process(*words)) as front:
            client: Any = openai.OpenAI(base_url=f"{front.wait()}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError, match="ask for a stream, or for fewer tokens") as late:
                    client.completions.create(model="little", prompt="Hello", max_tokens=2, stream=stream)
                assert late.value.status_code == 504
        assert (busy.asked >= 1, other.asked) == (True, 0)


def test_where_a_role_has_died_the_other_answers_and_then_nobody(fleet: Fleet, breaking: Breaking, alone: dict[int, str]) -> None:
    breaking.close()
    stream = iter(fleet.ask(4, stream=True, max_tokens=1500))
    texts = [next(stream).choices[0].text]
    fleet.decode.kill()
    with pytest.raises(openai.APIError):
        texts.extend(piece.choices[0].text for piece in stream)
    began = "".join(texts)
    assert began.startswith(alone[4]) or alone[4].startswith(began)
    assert fleet.ask(5).choices[0].text == alone[5]
    fleet.prefill.kill()
    with pytest.raises(openai.InternalServerError, match="no worker can be reached") as refused:
        fleet.ask(6)
    assert refused.value.status_code == 503
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{fleet.url}/health", timeout=WAIT_S)
