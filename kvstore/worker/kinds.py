"""Which kinds of models the paged cache serves, told from a loaded model: what it cannot do is refused before the first token.

Served: decoders whose every layer keeps K and V of its own, in one geometry, and attends to all tokens before or to a window of the
last ones; heads in groups or not; capped scores; sinks; latent attention. `docs/models.md` lists the families that were compared.
"""

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvstore.worker.latent import is_latent

_LAYERS = frozenset({"full_attention", "sliding_attention"})


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
