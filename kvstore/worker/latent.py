"""Latent attention (MLA, DeepSeek-V2): only the latent and the rotary key of a token are kept, whatever the number of heads.

transformers' modules of this kind compress a token's K and V, hand both parts to a cache, and expand what comes back to K and V per
head. Inside `kept_compressed` they skip the expansion, so that the attention function gets the compressed parts and keeps those.

Two ways to the same result: *expanded*, every kept latent becomes K and V of each head; *absorbed*, the queries are brought into the
latent space instead, attend there, and only what comes out is expanded. The second is cheaper for few new tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def kept(latents: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer keeps of its new tokens, [1, 1, token, dim] each: as keys [1, token, dim], and values without items."""
    return torch.cat((latents[0], rope[0]), dim=-1), rope[0, ..., :0]


def is_latent(module: torch.nn.Module) -> bool:
    """Whether an attention module keeps latents."""
    return hasattr(module, "expand_kv")


@contextmanager
def kept_compressed(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model's latent attention modules hand latents and rotary keys to their attention function as they are."""
    has_latents = getattr(model.config, "kv_lora_rank", None) is not None  # or no module need be looked at
    modules = [module for module in model.modules() if is_latent(module)] if has_latents else []
    for module in modules:
        cast(Any, module).expand_kv = _as_they_are
    try:
        yield
    finally:
        for module in modules:
            del cast(Any, module).expand_kv  # the class's own shows again


def attend(module: torch.nn.Module, query: Tensor, kept: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of one sequence's new tokens over what it has kept.

    query   [1, heads, new tokens, nope ‖ rope]    kept  [1, token, latent ‖ rope]    mask  as SDPA takes it; None: causal
    Returns [1, new tokens, heads, value dim].
    """
    count = query.shape[2]
    is_whole_prompt = mask is None and count > 1  # nothing was kept before: to the last bit as transformers does it
    if not is_whole_prompt and is_cheaper_absorbed(cast(Any, module), count):
        return absorbed(module, query, kept, mask, scaling)
    return expanded(module, query, kept, mask, scaling)


def is_cheaper_absorbed(module: Any, count: int) -> bool:
    """Whether `count` new tokens cost fewer multiplications absorbed, for long contexts.

    Per head and kept token: expanded latent * (nope + value) once and nope + rope + value for each new token; absorbed
    2 * latent + rope for each.
    """
    latent, rest = module.kv_lora_rank, module.qk_nope_head_dim + module.v_head_dim
    return bool(count * (2 * latent - rest) < latent * rest)


def expanded(module: torch.nn.Module, query: Tensor, kept: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """`attend` through K and V per head, as transformers does it."""
    parts = cast(Any, module)
    kept = kept[None]
    keys, values = type(parts).expand_kv(parts, kept[..., : parts.kv_lora_rank], kept[..., parts.kv_lora_rank :])
    out, _ = sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling)
    return out


def absorbed(module: torch.nn.Module, query: Tensor, kept: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """`attend` in the latent space: q·(W c) = (Wᵀ q)·c, so all heads share one key and one value a token."""
    inside = absorb(module, query[0])
    heads, count, _ = inside.shape
    scores = (inside.reshape(heads * count, -1) @ kept[0].t() * scaling).view(heads, count, -1)
    if count > 1:
        scores = scores.masked_fill(~_seen(count, kept.shape[1], mask), torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    latents = weights.view(heads * count, -1) @ kept[0, :, : cast(Any, module).kv_lora_rank]
    return bring_out(module, latents.view(heads, count, -1))[None]


def absorb(module: torch.nn.Module, query: Tensor) -> Tensor:
    """Queries [head, token, nope ‖ rope] in the latent space: [head, token, latent ‖ rope]."""
    parts = cast(Any, module)
    weight = parts.kv_b_proj.weight.view(query.shape[0], -1, parts.kv_lora_rank)[:, : parts.qk_nope_head_dim]
    return torch.cat((query[..., : parts.qk_nope_head_dim] @ weight, query[..., parts.qk_nope_head_dim :]), dim=-1)


def bring_out(module: torch.nn.Module, latents: Tensor) -> Tensor:
    """Weighted sums of latents [head, token, latent] as results [token, head, value dim]."""
    parts = cast(Any, module)
    weight = parts.kv_b_proj.weight.view(latents.shape[0], -1, parts.kv_lora_rank)[:, parts.qk_nope_head_dim :]
    out: Tensor = latents @ weight.transpose(1, 2)
    return out.transpose(0, 1).contiguous()


def _seen(count: int, total: int, mask: Tensor | None) -> Tensor:
    """[new token, token]: True where it is seen; without a mask the last new token sees all, the one before all but one, …"""
    if mask is not None:
        return mask[0, 0]
    return torch.ones(count, total, dtype=torch.bool).tril(total - count)


def _as_they_are(latents: Tensor, rotary_keys: Tensor) -> tuple[Tensor, Tensor]:
    return latents, rotary_keys
