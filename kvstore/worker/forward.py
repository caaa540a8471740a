"""One forward pass of a model over the next tokens of some sequences."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from kvstore.worker.attention import Step
from kvstore.worker.model import LoadedModel
from kvstore.worker.paged import PagedCache
from kvstore.worker.sequences import AnySequence


class Spent(Protocol):
    """Where the time of a pass is noted, in seconds."""

    gather_s: float
    write_s: float
    compute_s: float


def forward(loaded: LoadedModel, cache: PagedCache, parts: Sequence[tuple[AnySequence, int]], spent: Spent) -> Tensor:
    """Compute the next so many tokens of each sequence, for which `ensure` has found slots.

    Returns logits [known, vocab], of each sequence that has no token left to compute afterwards, in their order. Where none is, one row
    without meaning.
    """
    began_at = time.perf_counter()
    step = cache.step(parts)
    tokens = [token for each, count in parts for token in each.tokens[each.computed : each.computed + count]]
    places = [(each, place) for each, count in parts for place in range(each.computed, each.computed + count)]
    positions = [0 if each.unrotated else place for each, place in places]
    known = [
        span.at + count - 1
        for span, (each, count) in zip(step.spans, parts, strict=True)
        if each.computed + count == len(each.tokens)
    ]  # fmt: skip
    if cache.runner is not None:
        logits = cache.runner.logits(partial(_pass, loaded), step, tokens, positions, known or [0], cache.pool.arena())
    else:
        logits = _pass(loaded, torch.tensor([tokens]), torch.tensor([positions]), torch.tensor(known or [0]), step)
    spent.gather_s, spent.write_s = step.gather_s, step.write_s
    spent.compute_s = time.perf_counter() - began_at - step.gather_s - step.write_s
    return logits


def _pass(loaded: LoadedModel, ids: Tensor, positions: Tensor, kept: Tensor, step: Step) -> Tensor:
    """Logits [kept, vocab] of a row of token ids [1, n] at `positions` [1, n]."""
    model = cast(Any, loaded.model)
    out = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept, paged_step=step)
    return cast(Tensor, out.logits[0])
