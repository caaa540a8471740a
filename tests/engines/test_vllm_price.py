"""What the store costs a vLLM that finds nothing in it."""

import statistics
from pathlib import Path

import pytest

from kvstore.testing.daemon import DaemonProcess
from tests.engines.engine import Engine, connector
from tests.engines.prompts import prompt

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(400)]
PAIRS = 12
PROMPT_TOKENS = 520  # four full blocks to store, and a little
MOST_RATIO = 1.03  # of a cold time to first token, with the store over without
TRIES = 3  # on a machine that does other things the medians of twelve still move by a few percent


def test_a_cold_prompt_costs_hardly_more_with_the_store(daemon: DaemonProcess, model: Path, tmp_path: Path) -> None:
    """Two engines, one with the store and one without, answer the same new prompts in turn."""
    engines = Engine(model, tmp_path / "alone.log", None), Engine(model, tmp_path / "with.log", connector(daemon.address))
    with engines[0] as alone, engines[1] as sharing:  # they start side by side
        for engine in (alone, sharing):
            engine.generate(prompt(1, PROMPT_TOKENS), 2)
        for attempt in range(TRIES):
            ratio = _ratio(alone, sharing, 1000 * (attempt + 1))
            if ratio <= MOST_RATIO:
                break
        assert ratio <= MOST_RATIO


def _ratio(alone: Engine, sharing: Engine, first: int) -> float:
    without_s: list[float] = []
    with_s: list[float] = []
    for seed in range(first, first + PAIRS):
        text = prompt(seed, PROMPT_TOKENS)
        without_s.append(alone.generate(text, 1)["ttft_s"])
        answer = sharing.generate(text, 1)
        assert answer["cached"] == 0
        with_s.append(answer["ttft_s"])
        sharing("settle")  # as a server does by itself: an engine inside a program takes its last steps with the next request
    medians = statistics.median(without_s), statistics.median(with_s)
    print(f"median time to first token: alone {medians[0]:.4f} s, with an empty store {medians[1]:.4f} s")
    return medians[1] / medians[0]
