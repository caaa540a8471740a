"""Rotary embedding apart from a model's forward pass, for keys that are kept before their rotation.

A forward pass in which every token is at position 0 rotates nothing: its queries and keys are only multiplied by the model's attention
scaling, if it has one. They are rotated here, later, to whatever positions their tokens have by then.
"""

import sys
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvstore.errors import InvalidArgument

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # every layer rotates, all alike, by apply_rotary_pos_emb
_LIKE = 1e-4  # of numbers around 1: how closely two rotations must agree in fp32, at positions up to some hundreds

Angles = tuple[Tensor, Tensor]  # cosines and sines, [1, token, dim]


class Rotation:
    """A model's rotation of queries and keys. Raises InvalidArgument for a model whose rotation cannot be put off."""

    def __init__(self, model: PreTrainedModel) -> None:
        base = cast(Any, model.base_model)
        kind = model.config.model_type
        if kind not in FAMILIES:
            raise InvalidArgument(f"streams need one of the models {', '.join(sorted(FAMILIES))}; this one is {kind}")
        if getattr(model.config, "sliding_window", None):
            raise InvalidArgument(
                f"the model has a window of {model.config.sliding_window} tokens; streams need full attention in every layer"
            )
        self._embedding = base.rotary_emb
        self._scaling = float(self._embedding.attention_scaling)
        self._apply = cast(Any, sys.modules[type(base.layers[0].self_attn).__module__]).apply_rotary_pos_emb
        self._check(base.layers[0].self_attn.head_dim)

    def angles(self, like: Tensor, positions: Tensor) -> Angles:
        """What turns vectors of the type of `like` to `positions` [token]."""
        cos, sin = self._embedding(like, positions[None])
        return cos / self._scaling, sin / self._scaling

    def turn(self, vectors: Tensor, angles: Angles) -> Tensor:
        """Vectors [head, token, dim] as the forward pass made them at position 0, turned."""
        turned, _ = self._apply(vectors[None], vectors[None, :1], *angles)
        return cast(Tensor, turned[0])

    def _check(self, dim: int) -> None:
        """That turning from 0 on is turning at once, and that position 0 turns nothing."""
        vectors, positions = torch.linspace(-1, 1, 5 * dim).view(1, 5, dim), torch.tensor([0, 1, 7, 100, 300])
        at_once = self.turn(vectors, self._embedding(vectors, positions[None]))
        at_zero = self.turn(vectors, self._embedding(vectors, 0 * positions[None]))
        if (self.turn(at_zero, self.angles(at_zero, positions)) - at_once).abs().max() > _LIKE:
            raise InvalidArgument("the model's rotation is not one that can be put off until its keys are read; streams need such a one")
