"""LoRA adapters in a vLLM with the store: each finds its own blocks only, and an adapter is its weights, not its name.

The engine's blocks are copied as those in a GPU's memory are, by a driver for tests.
"""

from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.daemon import DaemonProcess
from tests.engines import models
from tests.engines.engine import Engine, connector
from tests.engines.prompts import BLOCK_TOKENS, prompt
from tests.engines.test_vllm_requests import SMALL, fresh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TEXT = prompt(8, 300, models.VOCABULARY)


def answer(engine: Engine, number: int = 0, folder: Path | None = None) -> dict[str, Any]:
    """From a fresh cache, with an adapter or without; each number is loaded once by vLLM."""
    fresh(engine)
    lora = {"name": "tuned", "id": number, "path": str(folder)} if folder else None
    answers: list[dict[str, Any]] = engine("generate", prompts=[TEXT], max_tokens=12, lora=lora)
    return answers[0]


def test_an_adapter_finds_its_own_blocks_only(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Case 14: two adapters in turn, the model without one, other weights under the same name: no hit. The same weights elsewhere: one."""
    one, two = models.adapter(tmp_path / "one", 1), models.adapter(tmp_path / "two", 2)
    copy, changed = models.adapter(tmp_path / "copy", 1), models.adapter(tmp_path / "changed", 3)
    transfer = connector(daemon.address, "tests.engines.device", "DeviceConnector")
    with Engine(models.llama(tmp_path / "model"), tmp_path / "log", transfer, enable_lora=True, **SMALL) as engine:
        first = answer(engine, 1, one)
        assert first["cached"] == 0
        others = [answer(engine, 2, two), answer(engine)]
        again = answer(engine, 1, one)
        assert (again["cached"], again["ids"]) == (2 * BLOCK_TOKENS, first["ids"])
        others.append(answer(engine, 4, changed))
        assert [each["cached"] for each in others] == [0, 0, 0]
        assert all(each["ids"] != first["ids"] for each in others)
        elsewhere = answer(engine, 5, copy)
        assert (elsewhere["cached"], elsewhere["ids"]) == (2 * BLOCK_TOKENS, first["ids"])
