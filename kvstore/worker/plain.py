"""Greedy generation by transformers alone: what the worker's output is compared with, to the last bit."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache

from kvstore.worker.model import LoadedModel


@dataclass(frozen=True)
class PlainResult:
    """`first_logits` [vocab] of the first token; `ttft_s` until it was chosen."""

    tokens: list[int]
    first_logits: Tensor
    ttft_s: float


def generate_plain(loaded: LoadedModel, tokens: Sequence[int], max_tokens: int, split: int = 0) -> PlainResult:
    """Continue a prompt with a contiguous cache and no store.

    split    0: the prompt in one pass. Else a second pass computes the tokens from there on again, over the cache of the first one
             cut back to `split` tokens: what a worker computes that took so many from the store. Must leave at least one token.
    """
    model = cast(Any, loaded.model)
    began_at = time.perf_counter()
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        if split:
            cast(Any, cache).activate_past_recording()  # layers with windows keep what is cut back to
        logits = _forward(model, tokens, cache)
        if split:
            cache.crop(split - len(tokens))
            logits = _forward(model, tokens[split:], cache)
        made = choose(logits)
        ttft_s = time.perf_counter() - began_at
        first = logits[0]
        while len(made) < max_tokens and made[-1] not in loaded.eos:
            logits = _forward(model, made[-1:], cache)
            made.extend(choose(logits))
    return PlainResult(made, first, ttft_s)


def _forward(model: Any, tokens: Sequence[int], cache: DynamicCache) -> Tensor:
    out = model(input_ids=torch.tensor([list(tokens)]), cache=cache, use_cache=True, logits_to_keep=1)
    return cast(Tensor, out.logits[:, -1])


def choose(logits: Tensor) -> list[int]:
    """The likeliest token of each row of logits [batch, vocab]."""
    return cast(list[int], logits.float().argmax(dim=-1).tolist())
