"""Attention over paged K and V, as a function that transformers calls in place of its own.

One forward pass handles one `Step`: the new tokens of some sequences, one after another in a single row, and for each sequence how
many of its tokens are in the cache already. Prompts and single tokens may share a step. Each layer writes the new K and V into the
sequence's slots, gathers all of the layer into scratch, and calls transformers' own SDPA path on it. The bytes and the shapes are
those that a contiguous cache would have, so the result is equal to the last bit.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvstore.errors import InvalidArgument
from kvstore.worker.rows import BlockTable, Gatherer, Scratch

NAME = "kvstore_paged"
# What some models ask of their attention beyond a causal softmax; none of it is done here, so none may be passed over.
_REFUSED = ("softcap", "sliding_window", "s_aux", "position_bias")


@dataclass
class Span:
    """One sequence's part in a step: `start` tokens are in its slots; `count` are new, have slots to go to, and are the step's `at` on."""

    table: BlockTable
    start: int
    count: int
    at: int = 0
    mask: Tensor | None = field(init=False, default=None)
    gatherer: Gatherer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.start:
            total = self.start + self.count
            self.mask = sdpa_mask(batch_size=1, q_length=self.count, kv_length=total, q_offset=self.start)
            self.gatherer = Gatherer(self.table, -(-total // self.table.layout.tokens))

    @property
    def tokens(self) -> slice:
        """Where its new tokens are in the step."""
        return slice(self.at, self.at + self.count)


@dataclass
class Step:
    """One forward pass over the new tokens of its spans. Adds up what its parts took."""

    spans: list[Span]
    scratch: Scratch
    gather_s: float = 0.0
    write_s: float = 0.0

    def keys_values(self, span: Span, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All K and V that the new tokens attend to, [head, token, dim], after writing theirs: keys [head, new token, dim]."""
        began_at = time.perf_counter()
        keys, values = keys.contiguous(), values.contiguous()
        span.table.write(layer, span.start, keys, values)
        written_at = time.perf_counter()
        self.write_s += written_at - began_at
        if span.gatherer is None:
            return keys, values  # all there is was just computed: no need to read it back
        keys, values = span.gatherer.layer(layer, self.scratch)
        total = span.start + span.count
        self.gather_s += time.perf_counter() - written_at
        return keys[:, :total], values[:, :total]


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    paged_step: Step | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one layer for the step in `paged_step`, which is passed to the model's forward.

    query   [1, q_heads, new tokens, dim]     key, value  [1, kv_heads, new tokens, dim], all after their rotation
    Returns [1, new tokens, q_heads, dim]. Raises InvalidArgument without a step, and for what it does not do (windows, sinks, …).
    """
    if paged_step is None:
        raise InvalidArgument("paged attention was called without paged_step; pass it to the model's forward")
    for name in _REFUSED:
        if others.get(name) is not None:
            raise InvalidArgument(f"the model's attention uses {name}, which the paged cache does not do; serve it without the store")
    layer = cast(int, module.layer_idx)
    parts = []
    for span in paged_step.spans:
        keys, values = paged_step.keys_values(span, layer, key[0, :, span.tokens], value[0, :, span.tokens])
        out, _ = sdpa_attention_forward(module, query[:, :, span.tokens], keys[None], values[None], span.mask, scaling=scaling)
        parts.append(out)
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def no_mask(*_: object, **__: object) -> None:
    """The mask that transformers prepares for this attention: none, since each sequence of a step has its own."""


@contextmanager
def paged(model: PreTrainedModel) -> Iterator[None]:
    """The model calls this attention inside, and its own again after."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def register() -> None:
    """Make the attention known to transformers under NAME. Idempotent."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, no_mask)
