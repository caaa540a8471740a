"""A small random Llama with a real tokenizer, in a folder, for workers that are processes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvstore.worker.bundled import bundled_folder


def save_little_llama(place: Path, hidden_size: int, layers: int, heads: int, kv_heads: int, positions: int) -> Path:
    """In fp32; never ends by itself."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=hidden_size, intermediate_size=hidden_size * 3 // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=positions, initializer_range=0.2,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(place)
    AutoTokenizer.from_pretrained(bundled_folder(), local_files_only=True).save_pretrained(place)
    return place
