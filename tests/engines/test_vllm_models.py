"""Kinds of models in a vLLM with the store: a hit gives the answer of a run without it, or no hit is claimed."""

from pathlib import Path

import pytest

from kvstore.testing.daemon import DaemonProcess
from tests.engines import models
from tests.engines.engine import Engine, connector
from tests.engines.prompts import BLOCK_TOKENS, prompt
from tests.engines.test_vllm_requests import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TEXT = prompt(4, 700, models.VOCABULARY)
SHORT = prompt(5, 300, 40_000)


def test_latent_attention_on_a_cpu_claims_no_hit(daemon: DaemonProcess, tmp_path: Path) -> None:
    """vLLM's own kernels do not compute the same after a prefix there, so its own prefix cache is off, and the store is not used."""
    with Engine(models.latent(tmp_path / "model"), tmp_path / "log", connector(daemon.address), **SMALL) as engine:
        cold = engine.generate(TEXT, 16)
        engine("settle")
        again = engine.generate(TEXT, 16)
        assert (again["cached"], again["ids"]) == (0, cold["ids"])
        assert "latent attention" in engine.log()


def test_in_32_bits_a_hit_answers_as_a_cold_run(daemon: DaemonProcess, model: Path, tmp_path: Path) -> None:
    """The real model's greedy answer is that of a run that computed everything, whatever the split."""
    with Engine(model, tmp_path / "log", connector(daemon.address), dtype="float32") as engine:
        cold = engine.generate(SHORT, 16)
        engine("settle")
        assert engine("reset")
        hit = engine.generate(SHORT, 16)
        assert (hit["cached"], hit["ids"]) == (2 * BLOCK_TOKENS, cold["ids"])
