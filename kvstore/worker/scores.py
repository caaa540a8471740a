"""Attention of one sequence by torch: fused as transformers calls it; written out for capped scores and sinks, which that cannot do."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def by_sdpa(module: torch.nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """What transformers' own SDPA path gives, to the last bit; with a mask, without its copy of K and V for every query head.

    query   [1, q_heads, new tokens, dim]     keys, values  [kv_heads, token, dim]     mask  as SDPA takes it; None: causal
    Returns [1, new tokens, q_heads, value dim].
    """
    heads, count = keys.shape[0], query.shape[2]
    if mask is None or count == 1 or query.shape[1] == heads or query.device.type != "cpu":  # there is no such copy, or it is untried
        out: Tensor = sdpa_attention_forward(module, query, keys[None], values[None], mask, scaling=scaling)[0]
        return out
    # Each KV head is a sequence of a batch, whose heads are the query heads that it serves: all of them see the same K and V in place.
    grouped = query[0].view(heads, -1, count, query.shape[-1])
    keys, values = (part[:, None].expand(-1, grouped.shape[1], -1, -1) for part in (keys, values))
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return out.flatten(0, 1).transpose(0, 1)[None].contiguous()


def softmax_by_hand(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of one sequence with capped scores or sinks, in the arithmetic of transformers' eager path.

    query   [1, q_heads, new tokens, dim]     keys, values  [kv_heads, token, dim]     mask  [new token, token], None: all are seen
    softcap, sinks    as `attention.paged_attention` takes them
    Returns [1, new tokens, q_heads, value dim].
    """
    heads, count = query.shape[1:3]
    grouped = query[0].reshape(keys.shape[0], -1, query.shape[-1])  # the query heads of one KV head are rows of one product
    scores = (grouped @ keys.transpose(1, 2) * scaling).view(heads, count, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = softmax_with_sinks(scores, sinks).to(query.dtype)
    out = weights.view(keys.shape[0], -1, weights.shape[-1]) @ values
    return out.view(1, heads, count, -1).transpose(1, 2).contiguous()


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of scores [head, query, token]; `sinks` [head] takes its share of each query and gives nothing.

    Without sinks in fp32, with them in the scores' own type and after the largest was taken off, as transformers does either.
    """
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    extra = sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1).to(scores.dtype)
    whole = torch.cat((scores, extra), dim=-1)
    return (whole - whole.amax(dim=-1, keepdim=True)).softmax(dim=-1)[..., :-1]
