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
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
AT_ONCE = [prompt(10 + each, 300, models.VOCABULARY) for each in range(6)]


def test_processes_of_their_own_share_as_one_does(daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned in one process is loaded and saved in another; requests come several at a time; drafts are guessed, and rejected."""
    monkeypatch.setitem(Engine.environment, "VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with Engine(
        models.llama(tmp_path / "model"), tmp_path / "log", connector(daemon.address), speculative_config=DRAFTS, **SMALL
    ) as engine:
        cold = engine.generate(TEXT, 16)
        together = engine("generate", prompts=AT_ONCE, max_tokens=8)
        _reset(engine)
        hit = engine.generate(TEXT, 16)
        assert (hit["cached"], hit["ids"]) == (5 * BLOCK_TOKENS, cold["ids"])
        _of_drafts_only_what_was_accepted_is_stored(engine)
        again = engine("generate", prompts=AT_ONCE, max_tokens=8)
        assert [answer["cached"] for answer in again] == [2 * BLOCK_TOKENS] * len(AT_ONCE)
        assert [answer["ids"] for answer in again] == [answer["ids"] for answer in together]


def _of_drafts_only_what_was_accepted_is_stored(engine: Engine) -> None:
    text = prompt(17, 40, models.VOCABULARY) * 5  # each token was seen before, so that what followed it is guessed
    text += engine.generate(text, 200)["ids"]
    drafts = engine("stats", prefix="vllm:spec_decode_num_")
    assert drafts["vllm:spec_decode_num_draft_tokens_total"] > drafts["vllm:spec_decode_num_accepted_tokens_total"] + 50
    _reset(engine)
    hit = engine.generate(text, 16)
    assert hit["cached"] == (len(text) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert hit["ids"] == engine.without_store(text, hit["cached"], 16)
    _reset(engine)


def _reset(engine: Engine) -> None:
    """Empty the engine's own cache, once its steps, which go on by themselves, have saved the last blocks."""
    deadline_at = time.monotonic() + 30
    while not engine("reset"):
        assert time.monotonic() < deadline_at
