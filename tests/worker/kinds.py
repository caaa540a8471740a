"""One small random model for each kind of attention that the worker serves, and what transformers makes of a prompt with it.

All are in fp32, unless another type is asked for, and never end a text. The weights are large enough that an answer depends on tokens far
back, and that it varies: `test_kinds` has controls for both. Windows are no multiples of the tests' blocks of 8 tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
import transformers
from transformers import AutoModelForCausalLM

from kvstore.hashing import Identity
from kvstore.model_config import position_facts
from kvstore.worker.model import LoadedModel, prepare

VOCABULARY = 211  # tokens
WINDOW = 21  # tokens: longer than two blocks of 8, and no multiple of one

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_WIDE = {"head_dim": 24}  # unlike hidden size / heads
_MIXED = _WIDE | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
_GEMMA = {"query_pre_attn_scalar": 40, "tie_word_embeddings": False}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}

# By name: the class of the configuration, and what its numbers are beside the small ones.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _WIDE),
    "llama-yarn": ("LlamaConfig", _WIDE | {"rope_parameters": _YARN}),
    "mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "mqa": ("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 32}),
    "mistral": ("MistralConfig", _WIDE | {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", _WIDE),
    "qwen3-windows": ("Qwen3Config", _WIDE | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", _MIXED | _GEMMA | {"attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", _MIXED | _GEMMA),
    "sinks": ("GptOssConfig", _MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v2": ("DeepseekV2Config", _LATENT | {"q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3Config", _LATENT | {"q_lora_rank": 24}),
}
# Families whose attention is of one of these kinds, in modules of their own.
_RANKED = _LATENT | {"q_lora_rank": 24}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("Cohere2Config", _MIXED),
    "exaone4": ("Exaone4Config", _MIXED),
    "gemma": ("GemmaConfig", _WIDE | {"tie_word_embeddings": False}),
    "glm4": ("Glm4Config", _WIDE),
    "glm4-moe-lite": ("Glm4MoeLiteConfig", _RANKED),
    "granite": ("GraniteConfig", {}),
    "minicpm3": ("MiniCPM3Config", _RANKED),
    "ministral": ("MinistralConfig", _MIXED),
    "mistral-full": ("MistralConfig", _WIDE | {"sliding_window": None}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "olmo3": ("Olmo3Config", _MIXED),
    "phi": ("PhiConfig", {}),
    "qwen3-moe": ("Qwen3MoeConfig", _WIDE | _EXPERTS),
    "smollm3": ("SmolLM3Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "youtu": ("YoutuConfig", _RANKED),
}
WINDOWED = tuple(name for name, (_, facts) in KINDS.items() if "sliding_window" in facts)


@functools.cache
def load(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> LoadedModel:
    """The small model of this kind or family, with `more` in its config; the same one for all who ask."""
    torch.manual_seed(7)
    kind, facts = (KINDS | FAMILIES)[name]
    config = getattr(transformers, kind)(**SMALL | facts | more)
    model = cast(Any, AutoModelForCausalLM).from_config(config).to(torch.float32)
    _enliven(model)
    model.to(dtype)
    identity = Identity(model=name, revision="seed 7", position=position_facts(config), dtype=str(dtype).removeprefix("torch."))
    return prepare(model, identity)


def expected(loaded: LoadedModel, tokens: Sequence[int], max_tokens: int) -> list[int]:
    """What transformers' own `generate` makes of a prompt, greedily, with its own attention and cache."""
    ids = torch.tensor([list(tokens)])
    made = cast(Any, loaded.model).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return [int(token) for token in made[0, len(tokens) :]]


def _enliven(model: Any) -> None:
    """Give what starts at zero or one a value of its own, so that leaving it out would show."""
    with torch.no_grad():
        if hasattr(model.get_input_embeddings(), "embed_scale"):
            model.get_input_embeddings().weight *= 0.1  # or the last token alone would decide
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith(("sinks", "bias")):
                weight.add_(torch.randn_like(weight) * 0.2)
