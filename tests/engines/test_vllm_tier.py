"""The store as a tier of vLLM's own offloading: the engine's spec, managers and factory, with host memory in the place of a GPU's."""

from pathlib import Path
from typing import Any

import pytest

from kvstore.clients.client import KVClient
from tests.cases.figures import all_on_disk, tier
from tests.daemon.faulty import FaultyDaemon
from tests.engines import models
from tests.engines.engine import Engine
from tests.engines.prompts import BLOCK_TOKENS, prompt
from tests.engines.test_vllm_requests import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TEXTS = [prompt(41 + each, 700, models.VOCABULARY) for each in range(4)]
BLOCKS = 5
HIT = BLOCKS * BLOCK_TOKENS


def offloading(address: str) -> dict[str, Any]:
    """vLLM's configuration, its worker aside."""
    below = {"type": "KVStoreTier", "module_path": "kvstore.clients.vllm_tier", "address": address, "layout": "test", "timeout_s": 30.0}
    extra = {"spec_name": "HostTieringSpec", "spec_module_path": "tests.engines.host_tier", "cpu_bytes_to_use": 64 << 20}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {**extra, "secondary_tiers": [below]}}


def test_chunks_of_a_hybrid_model_that_one_engine_offloaded_another_one_loads(tmp_path: Path) -> None:
    """Full attention and windows; from memory, from disk. What cannot be read is computed, all without a daemon; after a reset none."""
    model = models.sliding(tmp_path / "model")
    with FaultyDaemon(tmp_path, dram="128MiB", nvme_bytes="256MiB") as daemon:
        with Engine(model, tmp_path / "one.log", offloading(daemon.address), **SMALL) as one, KVClient(daemon.address) as client:
            cold = [one.generate(text, 16)["ids"] for text in TEXTS]
            one("settle")
            chunks = tier(client, "dram").blocks
            assert chunks > len(TEXTS) * BLOCKS  # of each KV cache group its own
            assert all_on_disk(client, chunks)
        telling = {"enable_kv_cache_events": True, "publisher": "null"}
        with Engine(model, tmp_path / "two.log", offloading(daemon.address), kv_events_config=telling, **SMALL) as two:

            def answer(number: int) -> tuple[int, bool]:
                """How many tokens of a text were cached, and whether it was answered as by the first engine."""
                said = two.generate(TEXTS[number], 16)
                two("settle")
                return said["cached"], said["ids"] == cold[number]

            two("hear", chunks=chunks)
            assert answer(0) == (HIT, True)
            daemon.restart()
            two("hear", chunks=chunks)
            assert answer(1) == (HIT, True)
            daemon.restart()
            two("hear", chunks=chunks)
            daemon.fault("EIO", "read")
            assert answer(2) == (0, True)
            daemon.heal()
            daemon.kill9()
            assert answer(3) == (0, True)
            daemon.start()
            two("hear", chunks=1)
            assert two("reset", connector=True)
            assert answer(0) == (0, True)
            assert two("stale") == [[[False], "MISS"], [[True], "HIT"]]  # what began before a reset is of weights that may be gone
            assert two("partial") == {
                "stored": [True],
                "loaded": [[False, [0, 1]]],
                "right": [True, True, False, False],
                "mine": ["HIT", "HIT", "MISS", "MISS"],  # what could not be loaded is not promised to that request again
                "other": ["HIT", "HIT", "MISS", "HIT"],
                "events": [[False, [0, 1, 3]], [True, [0, 1, 3]]],  # stored; then cleared
            }
