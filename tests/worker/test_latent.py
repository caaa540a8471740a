"""Latent attention (MLA): one latent and one rotary key per token and layer in the store, and two ways to attend to them."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from kvstore.geometry import Geometry
from kvstore.worker import latent
from kvstore.worker.attention import paged
from kvstore.worker.paged import PagedCache
from tests.worker.kinds import load
from tests.worker.steps import forward, greedy, start
from tests.worker.stores import BLOCK_TOKENS, prompt, small_store

MODELS = ("deepseek-v2", "deepseek-v3")
TOLERANCE = 2e-5  # of numbers around 1 in fp32


def test_a_token_takes_the_bytes_of_one_latent_and_one_rotary_key() -> None:
    geometry = Geometry.from_hf_config(transformers.DeepseekV3Config().to_dict(), "bfloat16", 16)
    assert geometry.bytes_per_token == geometry.layers * (512 + 64) * 2 == geometry.layers * 1152
    assert geometry.block_bytes == geometry.slot_bytes - (-geometry.block_bytes % 4096) == 16 * geometry.bytes_per_token


@pytest.mark.parametrize("name", MODELS)
def test_a_stored_block_is_the_latents_that_transformers_caches(name: str) -> None:
    loaded = load(name)
    store = small_store(loaded)
    cache = PagedCache(store)
    tokens = prompt(2 * BLOCK_TOKENS + 3)
    greedy(loaded, cache, [tokens], 1)
    own = transformers.DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        cast(Any, loaded.model)(input_ids=torch.tensor([tokens]), cache=own)
    kept = torch.stack([torch.cat((layer.keys, layer.values), dim=-1)[0, 0] for layer in cast(Any, own).layers])
    slots, _ = store.committed[0]
    for block, unit in enumerate(slots.units.tolist()):
        found = np.frombuffer(store.block_bytes(unit), np.float32).reshape(3, BLOCK_TOKENS, 32 + 8)
        assert np.array_equal(found, kept[:, block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].numpy())
    assert len(store.block_bytes(0)) == 3 * (32 + 8) * 4 * BLOCK_TOKENS
    cache.close()


def some(name: str, count: int, total: int) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A module, queries and kept tokens for it."""
    torch.manual_seed(3)
    module = cast(Any, load(name).model).model.layers[1].self_attn
    return module, torch.randn(1, 4, count, 24), torch.randn(1, total, 40)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("count", "total"), [(1, 1), (1, 30), (5, 5), (5, 30)])
def test_absorbed_is_expanded_up_to_rounding(name: str, count: int, total: int) -> None:
    module, query, kept = some(name, count, total)
    mask = torch.ones(1, 1, count, total, dtype=torch.bool).tril(total - count) if 1 < count < total else None
    with torch.inference_mode():
        wide = latent.expanded(module, query, kept, mask, 0.2)
        narrow = latent.absorbed(module, query, kept, mask, 0.2)
    assert wide.shape == narrow.shape == (1, count, 4, 20)
    assert (wide - narrow).abs().max() <= TOLERANCE
    assert wide.abs().max() > 0.1


@pytest.mark.parametrize("way", ["expanded", "absorbed"])
@pytest.mark.parametrize("name", MODELS)
def test_either_way_alone_gives_the_logits_of_transformers(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "is_cheaper_absorbed", lambda module, count: way == "absorbed")
    loaded = load(name)
    cache, tokens = PagedCache(small_store(loaded)), prompt(50)
    with torch.inference_mode():
        wanted = cast(Any, loaded.model)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    sequence = start(loaded, cache, tokens)
    for end in (30, 49, 50):
        found = forward(loaded, cache, [(sequence, end - sequence.computed)])[0]
        assert (found - wanted[end - 1]).abs().max() <= 5 * TOLERANCE
    cache.close()


def test_the_cheaper_way_is_counted() -> None:
    module = transformers.DeepseekV3Config()
    assert latent.is_cheaper_absorbed(module, 1)
    assert latent.is_cheaper_absorbed(module, 170)
    assert not latent.is_cheaper_absorbed(module, 171)


def test_modules_expand_again_whatever_happens() -> None:
    model = load("deepseek-v3").model
    module = cast(Any, model).model.layers[0].self_attn
    with contextlib.suppress(KeyError), paged(model):
        assert "expand_kv" in vars(module)
        raise KeyError
    assert "expand_kv" not in vars(module)
    assert module.expand_kv.__func__ is type(module).expand_kv
