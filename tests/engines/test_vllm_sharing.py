"""Two vLLM processes share one store: what the first computed the second loads, and it answers as it would without the store."""

from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.daemon import DaemonProcess
from tests.engines.engine import Engine, connector
from tests.engines.prompts import BLOCK_TOKENS, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LONG = prompt(1, 2000)
LENGTHS = [blocks * BLOCK_TOKENS + more for blocks in (1, 3) for more in (-1, 0, 1)]


def by_own_cache(engine: Engine, tokens: list[int]) -> dict[str, Any]:
    """The answer from vLLM's own prefix cache, filled under a salt that the store knows nothing of."""
    engine.generate(tokens, 1, salt="own")
    return engine.generate(tokens, salt="own")


def test_a_second_engine_loads_what_the_first_one_computed(daemon: DaemonProcess, model: Path, tmp_path: Path) -> None:
    """At 2,000 tokens, and at lengths around a block's end: all full blocks but the last token's, the same greedy answer, sooner."""
    prompts = {tokens: prompt(tokens, tokens) for tokens in LENGTHS} | {len(LONG): LONG}
    with Engine(model, tmp_path / "one.log", connector(daemon.address)) as one:
        one.generate(prompt(99, 300), 2)  # the first request of a process pays for what is made once
        for tokens in prompts.values():
            cold = one.generate(tokens, 2)
        one("settle")
    with Engine(model, tmp_path / "two.log", connector(daemon.address)) as two:
        two.generate(prompt(98, 300), 2)
        found = {length: two.generate(tokens) for length, tokens in prompts.items()}
        expected = {length: by_own_cache(two, tokens) for length, tokens in prompts.items()}
    usable = {length: (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in prompts}
    assert {length: each["cached"] for length, each in found.items()} == usable
    assert {length: each["ids"] for length, each in found.items()} == {length: each["ids"] for length, each in expected.items()}
    hit = found[len(LONG)]
    print(f"time to first token: cold {cold['ttft_s']:.3f} s, from the store {hit['ttft_s']:.3f} s")
    assert hit["ttft_s"] <= cold["ttft_s"] / 4
