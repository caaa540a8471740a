"""Small random models in fp32 with heads that the CUDA kernels serve: one for each thing that these do."""

from __future__ import annotations

from typing import Any

from kvstore.worker.model import LoadedModel
from tests.worker import kinds

SIZES: dict[str, Any] = {"head_dim": 64, "num_hidden_layers": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpu-llama": ("LlamaConfig", SIZES),
    "gpu-mha": ("LlamaConfig", SIZES | {"num_key_value_heads": 4}),
    "gpu-windows": ("MistralConfig", SIZES | {"sliding_window": kinds.WINDOW}),
    "gpu-mixed": (
        "Qwen3Config",
        SIZES | {"use_sliding_window": True, "sliding_window": kinds.WINDOW, "max_window_layers": 1, "num_attention_heads": 6},
    ),
    "gpu-sinks": (
        "GptOssConfig",
        SIZES | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": kinds.WINDOW, "num_local_experts": 4,
                 "num_experts_per_tok": 2},
    ),
}  # fmt: skip


def load(name: str) -> LoadedModel:
    """The small model of this name, or of a kind of the worker's other tests."""
    kinds.KINDS.update(KINDS)
    return kinds.load(name)
