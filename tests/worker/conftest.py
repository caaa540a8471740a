"""The models that the worker's tests share."""

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.hashing import Identity
from kvstore.model_config import position_facts
from kvstore.worker.engine import Engine
from kvstore.worker.model import LoadedModel, load_model, prepare
from tests.worker.stores import Watched, small_store


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small models gain nothing from a second thread, and wait long for it where a core is busy."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """A random Llama in fp32 with two query heads a KV head; fast enough for hundreds of runs. It never ends a text."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=211, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=24, max_position_embeddings=512, initializer_range=0.2, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    identity = Identity(model="tiny", revision="seed 7", position=position_facts(config), dtype="float32")
    return prepare(model, identity)


@pytest.fixture(scope="session")
def smol() -> LoadedModel:
    """SmolLM2-135M-Instruct in bfloat16."""
    return load_model()


@pytest.fixture
def store(tiny: LoadedModel) -> Iterator[Watched]:
    """A store for the tiny model with room for 64 blocks of 8 tokens, watched."""
    made = small_store(tiny)
    yield made
    made.close()


@pytest.fixture
def engine(tiny: LoadedModel, store: Watched) -> Iterator[Engine]:
    """The tiny model over that store."""
    made = Engine(tiny, store)
    yield made
    made.close()
