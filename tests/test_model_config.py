"""Reading config.json of the families of models."""

from typing import Any

import pytest

from kvstore.errors import GeometryError
from kvstore.geometry import Geometry
from kvstore.model_config import read_attention

LLAMA: dict[str, Any] = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "torch_dtype": "bfloat16",
}  # fmt: skip


def _shape(config: dict[str, Any]) -> tuple[int, int, int, int, str]:
    geometry = Geometry.from_hf_config(config, None, 16)
    return geometry.layers, geometry.kv_heads, geometry.key_dim, geometry.value_dim, geometry.dtype


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (LLAMA, (32, 8, 128, 128, "bfloat16")),
        (LLAMA | {"num_key_value_heads": None}, (32, 32, 128, 128, "bfloat16")),
        (LLAMA | {"head_dim": 256, "torch_dtype": "torch.float16"}, (32, 8, 256, 256, "float16")),
        (LLAMA | {"dtype": "float32"}, (32, 8, 128, 128, "float32")),
        ({"text_config": LLAMA, "vision_config": {"hidden_size": 1}}, (32, 8, 128, 128, "bfloat16")),
        ({"n_embd": 768, "n_head": 12, "n_layer": 12}, (12, 12, 64, 64, "float32")),
        ({"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "multi_query": True}, (32, 1, 64, 64, "float32")),
        (LLAMA | {"layer_types": ["linear_attention", "mamba", "conv", "full_attention"] * 8}, (8, 8, 128, 128, "bfloat16")),
        (LLAMA | {"layer_types": ["sliding_attention", "full_attention"] * 16}, (32, 8, 128, 128, "bfloat16")),
        (LLAMA | {"num_kv_shared_layers": 12}, (20, 8, 128, 128, "bfloat16")),
    ],
)
def test_a_config_gives_its_geometry(config: dict[str, Any], shape: tuple[int, int, int, int, str]) -> None:
    assert _shape(config) == shape


def test_a_deepseek_config_gives_latent_attention() -> None:
    config = {
        "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "torch_dtype": "bfloat16",
    }  # fmt: skip
    geometry = Geometry.from_hf_config(config, "float8_e4m3fn", 64)
    assert geometry == Geometry.mla(layers=61, latent_dim=512, rope_dim=64, dtype="float8_e4m3fn", block_tokens=64)
    assert read_attention(config).query_heads == 128


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"hidden_size": 4097}, "head_dim"),
        ({"num_key_value_heads": 5}, "neither"),
        ({"global_head_dim": 512}, "namespace per group"),
        ({"torch_dtype": "float3"}, "float3"),
        ({"text_config": "x"}, "text_config"),
        ({"text_config": [1]}, "text_config"),
        ({"layer_types": 5}, "layer_types"),
    ],
)
def test_a_config_that_does_not_fit_says_why(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(GeometryError, match=named):
        Geometry.from_hf_config(LLAMA | changes, None, 16)


def test_the_config_of_the_models_library_is_read() -> None:
    transformers = pytest.importorskip("transformers")
    for config in (transformers.LlamaConfig(), transformers.MistralConfig(), transformers.Qwen3Config(), transformers.GemmaConfig()):
        geometry = Geometry.from_hf_config(config.to_dict(), "bfloat16", 16)
        assert (geometry.layers, geometry.kv_heads) == (config.num_hidden_layers, config.num_key_value_heads)
