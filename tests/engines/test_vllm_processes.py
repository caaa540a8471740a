"""A vLLM as a server runs it: scheduler and worker in processes of their own."""

import time
from pathlib import Path

import pytest

from kvstore.testing.daemon import DaemonProcess
from tests.engines import models
from tests.engines.engine import Engine, connector
from tests.engines.prompts import BLOCK_TOKENS, prompt
from tests.engines.test_vllm_requests import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TEXT = prompt(9, 700, models.VOCABULARY)
AT_ONCE = [prompt(10 + each, 300, models.VOCABULARY) for each in range(6)]


def test_processes_of_their_own_share_as_one_does(daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned in one process is loaded and saved in another; requests come several at a time."""
    monkeypatch.setitem(Engine.environment, "VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with Engine(models.llama(tmp_path / "model"), tmp_path / "log", connector(daemon.address), **SMALL) as engine:
        cold = engine.generate(TEXT, 16)
        together = engine("generate", prompts=AT_ONCE, max_tokens=8)
        deadline_at = time.monotonic() + 30
        while not engine("reset"):  # the engine's steps go on by themselves until the last blocks are saved
            assert time.monotonic() < deadline_at
        hit = engine.generate(TEXT, 16)
        assert (hit["cached"], hit["ids"]) == (5 * BLOCK_TOKENS, cold["ids"])
        again = engine("generate", prompts=AT_ONCE, max_tokens=8)
        assert [answer["cached"] for answer in again] == [2 * BLOCK_TOKENS] * len(AT_ONCE)
        assert [answer["ids"] for answer in again] == [answer["ids"] for answer in together]
