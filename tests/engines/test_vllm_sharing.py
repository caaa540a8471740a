"""Two vLLM processes share one store: what the first computed the second loads, and it answers as it would without the store."""

from pathlib import Path
from typing import Any

import pytest

from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.cases.figures import eventually, settled, tier
from tests.engines.engine import Engine, connector
from tests.engines.prompts import BLOCK_TOKENS, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LONG, TORN = prompt(1, 2000), prompt(2, 1500)
PROMPTS = [prompt(blocks, blocks * BLOCK_TOKENS + more) for blocks in (1, 3) for more in (-1, 0, 1)]


def usable(tokens: list[int]) -> int:
    """Of a prompt, the tokens that a store may bring."""
    return (len(tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def assert_right(engine: Engine, tokens: list[int], answer: dict[str, Any]) -> None:
    """The answer is that of vLLM's own prefix cache at the same split."""
    assert answer["ids"] == engine.without_store(tokens, answer["cached"])


def test_a_second_engine_loads_what_the_first_one_computed(daemon: DaemonProcess, model: Path, tmp_path: Path) -> None:
    """At 2,000 tokens, and at lengths around a block's end: all full blocks but the last token's, the same greedy answer, sooner.

    The first engine is killed in the middle of a save; later the daemon is, and the blocks come from the disk. The second one has the
    connector as a plugin of vLLM, by its name alone.
    """
    with Engine(model, tmp_path / "one.log", connector(daemon.address)) as one, KVClient(daemon.address) as client:
        one.generate(prompt(99, 300), 2)  # the first request of a process pays for what is made once
        cold = [one.generate(tokens, 2) for tokens in (*PROMPTS, LONG)][-1]
        one("settle")
        one.send("generate", prompts=[TORN], max_tokens=50)
        assert eventually(lambda: any(session.reserved_slots for session in client.stats().sessions), 30)
        one.kill()
    with Engine(model, tmp_path / "two.log", connector(daemon.address, module="")) as two, KVClient(daemon.address) as client:
        two.generate(prompt(98, 300), 2)
        hit = two.generate(LONG)
        print(f"time to first token: cold {cold['ttft_s']:.3f} s, from the store {hit['ttft_s']:.3f} s")
        answers = [(tokens, two.generate(tokens)) for tokens in PROMPTS]
        assert [answer["cached"] for _, answer in answers] == [usable(tokens) for tokens in PROMPTS]
        assert hit["cached"] == usable(LONG)
        assert hit["ttft_s"] <= cold["ttft_s"] / 4
        for tokens, answer in [*answers, (LONG, hit), (TORN, two.generate(TORN))]:
            assert_right(two, tokens, answer)
        two("settle")
        assert settled(client)
        assert eventually(lambda: tier(client, "nvme").blocks >= tier(client, "dram").blocks, 60)
        daemon.restart()
        assert two("reset")
        two.generate(prompt(97, 300), 2)  # it attaches again meanwhile
        from_disk = two.generate(LONG)
        print(f"time to first token: from the disk {from_disk['ttft_s']:.3f} s")
        assert from_disk["cached"] == usable(LONG)
        assert from_disk["ttft_s"] <= cold["ttft_s"] / 4
        assert_right(two, LONG, from_disk)
