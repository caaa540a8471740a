"""Reads what attention keeps per token out of a Hugging Face config.json, under the names that model families give it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import GeometryError

# Layers of these types keep a state of fixed size instead of keys and values.
_STATE_LAYERS = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "state_space")


@dataclass(frozen=True)
class Attention:
    """`layers` counts those that keep KV of their own. `latent_dim` is 0 unless the model uses latent attention (MLA)."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latent_dim: int
    rope_dim: int
    dtype: str


def read_attention(config: Mapping[str, Any]) -> Attention:
    """The attention facts of a parsed config.json, llama, mistral, qwen, gemma, falcon and deepseek style.

    Multimodal configs are read through their text part. Raises GeometryError that names what is missing or does not fit.
    """
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise GeometryError(f"config: text_config is {text!r}; it must be an object")
    query_heads = _count(text, "num_attention_heads", "n_head", "num_heads")
    hidden = _count(text, "hidden_size", "n_embd", "d_model")
    head_dim = _optional(text, "head_dim", "attention_head_dim", "kv_channels") or _per_head(hidden, query_heads)
    if _optional(text, "global_head_dim") not in (0, head_dim):
        raise GeometryError("global_head_dim differs from head_dim: open one namespace per group of layers, each with its own geometry")
    kv_heads = _kv_heads(text, query_heads)
    if query_heads % kv_heads and kv_heads % query_heads:
        raise GeometryError(f"{query_heads} query heads and {kv_heads} KV heads: neither divides the other; check the config")
    return Attention(
        layers=_kv_layers(text),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        latent_dim=_optional(text, "kv_lora_rank"),
        rope_dim=_optional(text, "qk_rope_head_dim"),
        dtype=_dtype(config, text),
    )


def position_facts(config: Any) -> str:
    """What a loaded Hugging Face config object says of positions, as canonical JSON; "" for a model that has nothing to say.

    Every rope parameter, those of each type of layer where they differ; and the window of layers that see only the last tokens,
    since what a layer sees decides the keys of the next.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    facts = dict(rope)
    if facts:
        each = [part for part in facts.values() if isinstance(part, Mapping)] or [facts]
        if any(part.get("rope_type", "default") != "default" for part in each):
            facts["max_position_embeddings"] = config.max_position_embeddings
        for name in ("head_dim", "partial_rotary_factor"):
            value = _fact(config, name)
            if value is not None:
                facts[name] = value
    facts |= _window_facts(config)
    return json.dumps(facts, sort_keys=True, separators=(",", ":")) if facts else ""


def _fact(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001  a config whose layers differ in it raises an error of its library's
        return config.to_dict().get(name)


def _window_facts(config: Any) -> dict[str, Any]:
    """The window, and which layers have it where not all do; nothing for a model without one."""
    window = getattr(config, "sliding_window", None)
    kinds = list(getattr(config, "layer_types", None) or [])
    if not window or (kinds and "sliding_attention" not in kinds):
        return {}
    return {"sliding_window": window} | ({"layer_types": kinds} if len(set(kinds)) > 1 else {})


def _kv_heads(text: Mapping[str, Any], query_heads: int) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    return _optional(text, "num_key_value_heads", "num_kv_heads", "multi_query_group_num") or query_heads


def _kv_layers(text: Mapping[str, Any]) -> int:
    layers = _count(text, "num_hidden_layers", "n_layer", "num_layers")
    kinds = text.get("layer_types") or []
    if not isinstance(kinds, list | tuple):
        raise GeometryError(f"config: layer_types is {kinds!r}; it must be a list")
    if len(kinds) == layers:
        layers -= sum(str(kind) in _STATE_LAYERS for kind in kinds)
    return layers - _optional(text, "num_kv_shared_layers")


def _per_head(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise GeometryError(f"hidden size {hidden} is no multiple of {heads} heads; give head_dim in the config")
    return hidden // heads


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    found = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "float32"
    return str(found).removeprefix("torch.")


def _optional(text: Mapping[str, Any], *names: str) -> int:
    """The first of these that is set; 0 where none is."""
    for name in names:
        value = text.get(name)
        if value is not None:
            if type(value) is not int or value < 0:
                raise GeometryError(f"config: {name} is {value!r}; it must be a whole number")
            return value
    return 0


def _count(text: Mapping[str, Any], *names: str) -> int:
    value = _optional(text, *names)
    if value == 0:
        raise GeometryError(f"config: none of {', '.join(names)} is set; is this a language model's config.json?")
    return value
