"""A paged cache driven step by step, without an engine: which tokens share a step is the test's to say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from kvstore.hashing import fingerprint
from kvstore.worker import attention
from kvstore.worker.model import LoadedModel
from kvstore.worker.paged import PagedCache, PagedSequence


def start(loaded: LoadedModel, cache: PagedCache, tokens: Sequence[int]) -> PagedSequence:
    """A sequence under the model's own identity."""
    return cache.open(tokens, fingerprint(loaded.identity))


def forward(loaded: LoadedModel, cache: PagedCache, parts: Sequence[tuple[PagedSequence, int]]) -> Tensor:
    """Logits [sequence, vocab] after the next so many tokens of each sequence, computed in one step."""
    for sequence, count in parts:
        sequence.ensure(count)
    step = cache.step(parts)
    places = [range(sequence.computed, sequence.computed + count) for sequence, count in parts]
    tokens = [sequence.tokens[place] for (sequence, _), some in zip(parts, places, strict=True) for place in some]
    positions = [place for some in places for place in some]
    last = torch.tensor([span.at + span.count - 1 for span in step.spans])
    with torch.inference_mode(), attention.paged(loaded.model):
        out = cast(Any, loaded.model)(
            input_ids=torch.tensor([tokens]), position_ids=torch.tensor([positions]), use_cache=False, logits_to_keep=last, paged_step=step
        )
    for sequence, count in parts:
        sequence.advance(count)
    return cast(Tensor, out.logits[0])


def greedy(
    loaded: LoadedModel, cache: PagedCache, prompts: Sequence[Sequence[int]], max_tokens: int, chunk: int = 1 << 20
) -> list[list[int]]:
    """What each prompt is continued with. All run in the same steps, prompts in chunks of at most so many tokens."""
    sequences = [start(loaded, cache, tokens) for tokens in prompts]
    made: list[list[int]] = [[] for _ in prompts]
    while any(len(tokens) < max_tokens for tokens in made):
        running = [at for at, tokens in enumerate(made) if len(tokens) < max_tokens]
        parts = [(sequences[at], min(chunk, len(sequences[at].tokens) - sequences[at].computed)) for at in running]
        chosen = forward(loaded, cache, parts).argmax(dim=-1).tolist()
        for at, token in zip(running, chosen, strict=True):
            if sequences[at].computed == len(sequences[at].tokens):
                made[at].append(token)
                sequences[at].append(token)
    for sequence in sequences:
        sequence.close()
    return made
