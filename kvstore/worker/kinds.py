"""Which kinds of models the paged cache serves, told from a loaded model: what it cannot do is refused before the first token.

Served: decoders whose every layer keeps K and V of its own, in one geometry, and attends to all tokens before or to a window of the
last ones; heads in groups or not; capped scores; sinks; latent attention. `docs/models.md` lists the families that were compared.
A model that looks like one of these is tried on a few tokens beside its own attention.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvstore.errors import KVStoreError
from kvstore.geometry import Geometry
from kvstore.worker import attention
from kvstore.worker.latent import is_latent
from kvstore.worker.rows import ArenaRows, BlockTable, RowLayout, Scratch
from kvstore.worker.spans import Span

_LAYERS = frozenset({"full_attention", "sliding_attention"})
TRIED_TOKENS = (4, 3)  # tokens of the trial's steps: the second reads what the first wrote
# How far a trial's logits may be from those of the model's own attention, as a share of the largest: rounding, and in 16 bits also a
# token that goes to another expert for it. Attention to the wrong tokens is further off.
_FP32_SHARE, _OTHER_SHARE = 1e-3, 0.4


def reason_to_refuse(model: PreTrainedModel) -> str:
    """Why the paged cache cannot serve a model; "" where it can."""
    config = model.config
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if unknown:
        return f"layers of type {', '.join(sorted(unknown))} keep or see something else than K and V of the tokens before"
    if getattr(config, "is_encoder_decoder", False) or hasattr(config, "text_config"):
        return "only decoders of text are served"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        return "its attention sees tokens that come later"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share K and V"
    if not model._can_set_attn_implementation():
        return "its attention cannot be replaced"
    modules = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "o_proj")]
    for module in modules:
        why_not = _reason_of_module(module)
        if why_not:
            return why_not
    if getattr(config, "kv_lora_rank", None) and not all(is_latent(module) for module in modules):
        return "its latent attention does not follow the form of DeepseekV3Attention in transformers"
    return ""


def _reason_of_module(module: torch.nn.Module) -> str:
    parts = cast(Any, module)
    if hasattr(module, "indexer"):
        return "its attention chooses the tokens it sees by keys of another kind"
    if is_latent(module):
        wanted = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_heads")
        missing = [name for name in wanted if not hasattr(module, name)]
        if missing or parts.kv_b_proj.bias is not None:
            return f"its latent attention does not follow the form of DeepseekV3Attention in transformers ({', '.join(missing) or 'bias'})"
    return ""


def reason_of_trial(model: PreTrainedModel, geometry: Geometry) -> str:
    """Why a model's logits over the paged cache are not those of its own attention and cache; "" where they are."""
    layout = RowLayout(geometry)
    blocks = -(-sum(TRIED_TOKENS) // layout.tokens)
    arena = ArenaRows(layout, np.zeros(blocks * geometry.slot_bytes, np.uint8))
    table, scratch = BlockTable(layout), Scratch(layout)
    table.append(arena, [index * geometry.slot_units for index in range(blocks)])
    cache = DynamicCache(config=model.config)
    start = 0
    for count in TRIED_TOKENS:
        step = attention.Step([Span(table, start, count)], scratch)
        try:
            with attention.paged(model):
                found = _logits(model, start, count, use_cache=False, paged_step=step)
        except KVStoreError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  whatever a model's own code may raise
            return f"its forward pass fails over the paged cache ({type(error).__name__}: {error})"
        if len(step.layers) != geometry.layers:
            return f"{len(step.layers)} of its {geometry.layers} layers asked for paged attention"
        wanted = _logits(model, start, count, use_cache=True, cache=cache)
        share = _FP32_SHARE if model.dtype == torch.float32 else _OTHER_SHARE
        if not (found - wanted).abs().max() <= share * wanted.abs().max():
            return "its logits over the paged cache are not those of its own attention"
        start += count
    return ""


def _logits(model: PreTrainedModel, start: int, count: int, **facts: Any) -> Tensor:
    """[token, vocab] in fp32 for `count` tokens from position `start` on."""
    places = range(start, start + count)
    ids = torch.tensor([[place % model.config.vocab_size for place in places]])
    with torch.inference_mode():
        out = cast(Any, model)(input_ids=ids, position_ids=torch.tensor([list(places)]), **facts)
    return cast(Tensor, out.logits[0].float())
