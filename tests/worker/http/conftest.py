"""Servers for the HTTP tests: before a scripted engine, and a real one over a real daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from kvstore.testing.daemon import DaemonProcess
from kvstore.worker.http.app import Settings
from kvstore.worker.http.server import Ending
from kvstore.worker.model import LoadedModel
from kvstore.worker.texts import Texts
from tests.worker.http.scripted import WAIT_S, Running, running

MODEL = "SmolLM2-135M-Instruct"
KEY = "the key"
RUNNING = 8  # sequences that the real worker runs at once


class Worker:
    """`kvstore worker` as a process of its own."""

    def __init__(self, *flags: str, environment: dict[str, str] | None = None) -> None:
        program = [sys.executable, "-c", "from kvstore.cli.main import main; raise SystemExit(main())", "worker"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        self.process = subprocess.Popen(
            [*program, "--http", "127.0.0.1:0", *flags],
            stdout=subprocess.PIPE, text=True, env=inherited | {"OMP_NUM_THREADS": "1"} | (environment or {}),
        )  # fmt: skip
        assert self.process.stdout
        self.ready = self.process.stdout.readline()
        self.url = self.ready.partition(" on ")[2].partition("/v1,")[0]

    def client(self, key: str = KEY) -> openai.OpenAI:
        """A client that tries once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S)

    def close(self) -> None:
        """End it whatever it does."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture(scope="session")
def smol_texts(smol: LoadedModel) -> Texts:
    """The bundled model's tokenizer."""
    return Texts(smol)


@pytest.fixture(scope="module")
def _shared(smol_texts: Texts) -> Iterator[Running]:
    with running(smol_texts, Settings(MODEL), Ending(deadline_s=WAIT_S)) as server:
        yield server


@pytest.fixture
def scripted(_shared: Running) -> Iterator[Running]:
    """A server before an engine that says what the test tells it. It serves many tests, which may not end it."""
    yield _shared
    _shared.engine.refusal = None
    _shared.engine.forget()


@pytest.fixture
def own(smol_texts: Texts) -> Iterator[Running]:
    """Such a server of the test's own."""
    with running(smol_texts, Settings(MODEL), Ending(deadline_s=WAIT_S)) as server:
        yield server


@pytest.fixture(scope="module")
def client(_shared: Running) -> openai.OpenAI:
    """A client of the shared server, which tries once."""
    return client_of(_shared)


def client_of(server: Running, key: str = "none") -> openai.OpenAI:
    """A client of a server, which tries once."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S)


@pytest.fixture(scope="module")
def daemon_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon for a real worker."""
    with DaemonProcess(Path(tmp_path_factory.mktemp("daemon")), dram="256MiB", nvme=False) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def worker(daemon_process: DaemonProcess) -> Iterator[Worker]:
    """The real worker over the real daemon."""
    flags = ("--running", str(RUNNING), "--max-waiting", "1", "--drain-s", "0.5")
    process = Worker("--listen", daemon_process.address, *flags, environment={"KVSTORE_API_KEY": f"{KEY}\n"})  # as a secret's file
    yield process
    process.close()
