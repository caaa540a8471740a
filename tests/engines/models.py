"""Small models with random weights, saved as an engine loads them: for what the kind of attention decides, not the text.

The weights are large enough that an answer depends on every block before it: `test_vllm_models` has a control for that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCABULARY = 4096  # tokens
POSITIONS = 4096  # tokens
WINDOW = 200  # tokens: of `sliding`
SPREAD = 0.1  # standard deviation of the weights: with a model's usual 0.02 attention would hardly matter

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": SPREAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama(folder: Path) -> Path:
    """Full attention, grouped heads."""
    return _saved(folder, LlamaForCausalLM, LlamaConfig(**_SIZES, num_key_value_heads=2, head_dim=32))


def latent(folder: Path) -> Path:
    """Latent attention (MLA), as DeepSeek has it."""
    config = DeepseekV2Config(
        **_SIZES,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        first_k_dense_replace=3,
    )
    return _saved(folder, DeepseekV2ForCausalLM, config)


def sliding(folder: Path) -> Path:
    """Layers that see the last WINDOW tokens, and one that sees all."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return _saved(
        folder, Gemma3ForCausalLM, Gemma3TextConfig(**_SIZES, num_key_value_heads=1, head_dim=64, sliding_window=WINDOW, layer_types=kinds)
    )


def _saved(folder: Path, kind: type[PreTrainedModel], config: PreTrainedConfig) -> Path:
    torch.manual_seed(7)
    model = cast(Any, kind(config)).to(torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 0.05  # or the last token alone would decide, where input and output share the table
    model.save_pretrained(folder)
    return folder


def adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for `llama`, large enough to change its answers."""
    rank = 8
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(_SIZES["num_hidden_layers"]):
        for part, width in (("q_proj", 128), ("v_proj", 64)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, _SIZES["hidden_size"]) * SPREAD
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, rank) * SPREAD
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder
