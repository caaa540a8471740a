"""A GPU that is not there, and a store in its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvstore.errors import ConfigError
from kvstore.kernels.host import compiler
from kvstore.worker.engine import Engine, Options
from kvstore.worker.model import LoadedModel
from kvstore.worker.standalone import StandaloneStore
from tests.worker.gpu.fake import FakeGpu
from tests.worker.stores import BLOCK_TOKENS, Watched


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    """One that has broken no rule after the test."""
    try:
        compiler()
    except ConfigError as error:
        pytest.skip(str(error))
    made = FakeGpu()
    yield made
    made.close()
    assert made.driver.violations == []


@pytest.fixture
def alone(gpu: FakeGpu) -> Iterator[Callable[..., tuple[Engine, Watched]]]:
    """Makes an engine on the GPU over so many blocks of its memory: (model, blocks, options) → the engine and its store."""
    made: list[tuple[Engine, Watched]] = []

    def make(loaded: LoadedModel, blocks: int = 64, **options: object) -> tuple[Engine, Watched]:
        geometry = loaded.geometry(BLOCK_TOKENS)
        store = Watched(StandaloneStore(loaded.identity, geometry, blocks * geometry.slot_bytes, memory=gpu.memory))
        made.append((Engine(loaded, store, Options(gpu=gpu, **options)), store))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine, store in made:
        engine.close()
        assert store.held_bytes == 0
        store.close()
