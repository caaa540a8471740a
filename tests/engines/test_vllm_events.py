"""KV events of a vLLM with the store, as a router hears them on vLLM's own socket: what the store has, under vLLM's own hashes."""

from pathlib import Path
from typing import Any

import pytest

from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.cases.figures import all_on_disk, eventually
from tests.engines import models
from tests.engines.engine import Engine, connector
from tests.engines.prompts import BLOCK_TOKENS, prompt
from tests.engines.test_vllm_requests import SMALL, fresh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TEXT = prompt(31, 700, models.VOCABULARY)
BLOCKS = 5
BOTH = {"CPU", "STORAGE"}


class Router:
    """Believes what the engine publishes: of its own cache (GPU, as vLLM calls it on a CPU too), and of the store."""

    def __init__(self, engine: Engine, endpoint: str) -> None:
        self._engine, self._endpoint = engine, endpoint
        self.believes: set[tuple[str, int]] = set()  # medium and hash
        self.stored: list[dict[str, Any]] = []

    def hear(self) -> None:
        """Let the engine take a few steps, and read what it published."""
        self._engine.generate(TEXT[:3], 2)
        self._engine("settle")
        for event in self._engine("events", endpoint=self._endpoint):
            if event["kind"] == "AllBlocksCleared":
                continue  # the engine's own, when a test empties its cache
            assert event["medium"] == "GPU" or (event["ownership"], event["locality"], event["group_idx"]) == ("kvstore", "LOCAL", 0)
            places = {(event["medium"], block) for block in event["block_hashes"]}
            if event["kind"] == "BlockStored":
                self.believes |= places
                self.stored.append(event)
            else:
                self.believes -= places

    def media(self, block: int) -> set[str]:
        """Where in the store it believes a block to be."""
        return {medium for medium, each in self.believes if each == block and medium != "GPU"}

    def comes_to_believe(self, blocks: list[int], media: set[str]) -> bool:
        """Whether it hears, soon, that these blocks are in just these places."""

        def believes() -> bool:
            self.hear()
            return all(self.media(block) == media for block in blocks)

        return eventually(believes, 20)

    def told(self, medium: str) -> list[tuple[int, int | None, list[int]]]:
        """Each block that was told of: its hash, its parent's, its tokens."""
        found = []
        for event in (each for each in self.stored if each["medium"] == medium):
            parent, size = event["parent_block_hash"], event["block_size"]
            for at, block in enumerate(event["block_hashes"]):
                found.append((block, parent, event["token_ids"][at * size : (at + 1) * size]))
                parent = block
        return found


def test_a_router_hears_where_the_store_has_the_blocks(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Stored in memory, then on disk; gone after a clear; after a restart only what the disk has; in memory once loaded."""
    endpoint = f"ipc://{tmp_path}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    model = models.llama(tmp_path / "model")
    transfer = connector(daemon.address)
    with (
        Engine(model, tmp_path / "log", transfer, kv_events_config=events, **SMALL) as engine,
        KVClient(daemon.address) as client,
    ):
        router = Router(engine, endpoint)
        number = iter(range(1000))

        def listening() -> bool:
            engine.generate(prompt(1000 + next(number), 200, models.VOCABULARY), 1)
            router.hear()
            return bool(router.believes)

        assert eventually(listening, 20)
        router.stored.clear()
        engine.generate(TEXT, 2, "a salt")
        router.hear()
        own = router.told("GPU")
        blocks = [block for block, _, _ in own]
        assert [tokens for _, _, tokens in own] == [TEXT[at : at + BLOCK_TOKENS] for at in range(0, BLOCKS * BLOCK_TOKENS, BLOCK_TOKENS)]
        assert router.comes_to_believe(blocks, BOTH)
        assert router.told("CPU") == own
        # The disk may have been slower than the last prompt that was for listening alone: told of that one too, by now.
        on_disk = [each for each in router.told("STORAGE") if each[0] in blocks]
        assert sorted(on_disk) == sorted(own)
        first = next(event for event in router.stored if event["medium"] == "CPU")
        assert first["extra_keys"][0] == ["a salt"]
        assert first["kv_cache_spec_kind"] == "full_attention"
        client.clear()
        assert router.comes_to_believe(blocks, set())
        fresh(engine)
        engine.generate(TEXT, 2, "a salt")
        assert router.comes_to_believe(blocks, BOTH)
        assert all_on_disk(client, BLOCKS)
        daemon.restart()
        assert router.comes_to_believe(blocks, {"STORAGE"})
        fresh(engine)

        def loaded() -> bool:
            engine("reset")
            answer = engine.generate(TEXT, 2, "a salt")
            engine("settle")
            return bool(answer["cached"] == BLOCKS * BLOCK_TOKENS)

        assert eventually(loaded, 20)
        assert router.comes_to_believe(blocks, BOTH)
