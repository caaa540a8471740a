"""Models for the tests of the transformers client, and what transformers alone makes of a prompt."""

from __future__ import annotations

import inspect
import time
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvstore.clients.client import KVClient
from kvstore.clients.transformers import PrefixCache, PrefixStore
from kvstore.testing.daemon import DaemonProcess

BLOCK = 16  # tokens of a block, the client's own choice
TOLERANCE = 1e-4  # largest difference of a logit in fp32: sums come in another order
MADE = 4  # tokens that each run makes
VOCABULARY = 500  # token ids that prompts are drawn from: every model here has them


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids without meaning, none of them one that ends a text."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, length)]


def batch(prompts: list[list[int]], padding: int = 2) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, and their mask."""
    columns = max(map(len, prompts))
    ids = torch.tensor([[padding] * (columns - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (columns - len(each)) + [1] * len(each) for each in prompts])
    return ids, mask


def logits_of(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: DynamicCache | None = None) -> Tensor:
    """Logits [batch, vocab] after the last column, computed from what `cache` holds on; None: from the beginning."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    start = 0 if cache is None else cache.get_seq_length()
    inputs: dict[str, Any] = {"input_ids": ids[:, start:], "attention_mask": mask, "cache": cache or DynamicCache(config=model.config)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = positions[:, start:]
    with torch.inference_mode():
        return cast(Tensor, cast(Any, model)(**inputs, use_cache=True).logits[:, -1])


def generate(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: DynamicCache | None = None, **settings: Any) -> Tensor:
    """Greedy ids [batch, columns], prompts included."""
    return cast(Tensor, _run(model, ids, mask, cache, **settings).sequences)


def answer(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: DynamicCache | None = None) -> tuple[Tensor, list[list[int]]]:
    """Logits [batch, vocab] of the first token, and the greedy ids of all."""
    out = _run(model, ids, mask, cache, output_logits=True)
    return out.logits[0], out.sequences.tolist()


def _run(model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: DynamicCache | None, **settings: Any) -> Any:
    given = {} if cache is None else {"cache": cache}
    settings = {"max_new_tokens": MADE, "min_new_tokens": MADE, "do_sample": False, "pad_token_id": 2} | settings
    return cast(Any, model).generate(input_ids=ids, attention_mask=mask, return_dict_in_generate=True, **given, **settings)


def leave(prefixes: PrefixStore, tokens: list[int], **facts: Any) -> PrefixCache:
    """Compute one prompt and leave it in the store."""
    ids, mask = batch([tokens])
    cache = prefixes.load(ids, mask, **facts)
    logits_of(prefixes.model, ids, mask, cache)
    stored = prefixes.store(cache)
    assert stored.fault == ""
    assert stored.tokens == (len(tokens) // prefixes.geometry.block_tokens * prefixes.geometry.block_tokens,)
    return cache


def until_on_disk(daemon: DaemonProcess) -> None:
    """Wait until every block is on the disk tier too."""
    with KVClient(daemon.address) as client:
        for _ in range(600):
            blocks = {tier.tier: tier.blocks for tier in client.stats().tiers}
            if blocks["nvme"] >= blocks["dram"]:  # it may have more: of before a restart
                return
            time.sleep(0.05)
    raise AssertionError(f"blocks are still not on disk: {blocks}")
