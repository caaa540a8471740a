"""Attention written out, score by score, for what torch's fused attention cannot do: capped scores, and sinks."""

import torch
from torch import Tensor


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
    """Softmax over the last dimension of scores [head, query, token]; `sinks` [head] takes its share of each query and gives nothing."""
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    extra = sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1).to(scores.dtype)
    return torch.cat((scores, extra), dim=-1).softmax(dim=-1)[..., :-1]
