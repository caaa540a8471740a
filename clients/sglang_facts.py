"""What decides whether two SGLang engines may share pages: the model's identity, and how a page of the host pool is made up.

Values in, values out: the pool and the settings are the engine's own objects, read by their attributes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.digests import config_text, file_digest, files_digest
from kvstore.errors import ConfigError
from kvstore.geometry import Geometry
from kvstore.hashing import Identity

FORMAT = "sglang-"  # how the formats of its pages begin, which it names by hashes of its own
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
# What the extra config may say to the store, beside what the engine reads there itself.
OPTIONS = ("address", "timeout_s", "revision", "lora", "position", "kv_cache_dtype")
_ENGINES_OPTIONS = ("backend_name", "module_path", "class_name", "interface_v1")
# The engine's settings that change keys and values and are in no file of the model's folder.
_SETTINGS = ("json_model_override_args", "quantization", "load_format", "dtype", "model_impl", "weight_version")
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")


@dataclass(frozen=True)
class Facts:
    """One rank's namespace. `buffers`: pages are taken by their buffers, in that order; else flat, as the pool gives them."""

    identity: Identity
    geometry: Geometry
    shard: str
    buffers: bool


def unknown_options(extra: Mapping[str, Any]) -> list[str]:
    """Names in the extra config that neither the store nor the engine is known to read."""
    return sorted(set(extra) - {*OPTIONS, *_ENGINES_OPTIONS})


def single_pool(pool: Any) -> Any:
    """The one host pool of a model. Raises ConfigError where it has several: windows, states, indexes."""
    entries = getattr(pool, "entries", None)
    if entries is None:
        return pool
    if len(entries) != 1:
        names = ", ".join(str(entry.name) for entry in entries)
        raise ConfigError(f"the model keeps several pools ({names}): only full attention can be shared; attach no storage backend")
    return entries[0].host_pool


def facts_of(config: Any, pool: Any, arguments: Any | None, version: str) -> Facts:
    """One rank's facts.

    config      the engine's HiCacheStorageConfig;  pool  its host pool;  version  the engine's
    arguments   the engine's ServerArgs, or None where they cannot be read: then the extra config must say what they would
    Raises ConfigError for what cannot be shared, and where nothing says which weights or adapters are served.
    """
    extra = config.extra_config or {}
    _check(config, pool)
    buffers = bool(extra.get("interface_v1"))
    cache_dtype = str(extra.get("kv_cache_dtype") or getattr(arguments, "kv_cache_dtype", None) or "auto")
    geometry = _geometry(pool, version, buffers)
    if cache_dtype == "auto" and geometry.dtype in ("uint8", "int8"):
        raise ConfigError("the pool holds bytes of a kind that it does not name; give the extra config a 'kv_cache_dtype' (fp8_e4m3, ...)")
    model = str(getattr(arguments, "model_path", None) or config.model_name or "")
    identity = Identity(
        model=Path(model).name,
        revision=_revision(model, extra, arguments),
        adapter=_adapters(extra, arguments),
        position=_position(model, extra, arguments),
        dtype=f"{geometry.dtype}/kv-{cache_dtype}",
    )
    return Facts(identity, geometry, _shard(config), buffers)


def _check(config: Any, pool: Any) -> None:
    missing = [name for name in ("layout", "dtype", "page_size", "layer_num", "get_page_buffer_meta") if not hasattr(pool, name)]
    if missing or getattr(pool, "kv_buffer", None) is None:
        missing = missing or ["memory of its own"]
        raise ConfigError(f"a {type(pool).__name__} has no {', '.join(missing)}: its pages cannot be shared; attach no storage backend")
    if pool.layout not in LAYOUTS:
        raise ConfigError(f"memory layout {pool.layout!r} cannot be shared; start with --hicache-mem-layout {LAYOUTS[1]}")
    if getattr(pool, "target_layer_num", pool.layer_num) != pool.layer_num:
        raise ConfigError("the pool holds a draft model's layers too: they cannot be shared; serve without it, or without the backend")
    if config.should_split_heads or config.dcp_size > 1:
        raise ConfigError("pages split over other ranks (tp_lcm_size, context-parallel decoding) cannot be shared; leave them out")


def _geometry(pool: Any, version: str, buffers: bool) -> Geometry:
    """A page as an opaque block: the order of its bytes is in the format's name."""
    row = getattr(pool, "kv_cache_dim", 0)
    tag = getattr(pool, "storage_format_tag", None)
    parts = (f"{FORMAT}{version}", pool.layout, "buffers" if buffers else "flat", tag, row and f"row{row}")
    latent = hasattr(pool, "kv_lora_rank")
    return Geometry(
        kind="mla" if latent else "mha",
        layers=pool.layer_num,
        kv_heads=0 if latent else pool.head_num,
        key_dim=0 if latent else pool.head_dim,
        value_dim=0 if latent else getattr(pool, "v_head_dim", pool.head_dim),
        latent_dim=pool.kv_lora_rank if latent else 0,
        rope_dim=pool.qk_rope_head_dim if latent else 0,
        dtype=str(pool.dtype).removeprefix("torch."),
        block_tokens=pool.page_size,
        format="/".join(str(part) for part in parts if part),
        opaque_block_bytes=_page_bytes(pool, buffers),
    )


def _page_bytes(pool: Any, buffers: bool) -> int:
    import torch

    if buffers:
        _, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
        return int(sum(sizes))
    try:
        page = pool.get_dummy_flat_data_page()
    except NotImplementedError:
        raise ConfigError("this pool has no flat pages; give the extra config 'interface_v1': 1") from None
    return int(page.numel() * page.element_size())


def _revision(model: str, extra: Mapping[str, Any], arguments: Any | None) -> str:
    """Which weights, and the settings that change what they compute, as JSON."""
    folder = Path(model)
    weights = str(extra.get("revision") or getattr(arguments, "revision", None) or "")
    if not weights and model and folder.is_dir():
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        weights = files_digest(files, {"config.json": config_text(folder)}) if files else ""
    if not weights:
        raise ConfigError(f"model {model or '(no name)'}: nothing says which weights these are; give the extra config a 'revision'")
    facts: dict[str, str] = {"weights": weights}
    for name in _SETTINGS:
        facts[name] = _text(getattr(arguments, name, None))
    scales = getattr(arguments, "quantization_param_path", None)
    facts["scales"] = file_digest(Path(scales)) if scales else ""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def _adapters(extra: Mapping[str, Any], arguments: Any | None) -> str:
    """What names the weights of all adapters that may be served. The engine's page hashes hold their names and paths, not their weights."""
    named = str(extra.get("lora") or "")
    if named or "lora" in extra:
        return named
    if arguments is None:
        raise ConfigError("nothing says whether adapters are served; give the extra config 'lora': '' for none, or their digest")
    if getattr(arguments, "enable_lora", None) or getattr(arguments, "lora_paths", None):
        raise ConfigError("adapters are served, and a page's hash does not name their weights; give the extra config 'lora': a digest")
    return ""


def _position(model: str, extra: Mapping[str, Any], arguments: Any | None) -> str:
    """Every rope parameter, as JSON: from the folder's config.json and the settings that override it, or as given."""
    if "position" in extra:
        return _text(extra["position"])
    config = json.loads(config_text(Path(model))) if model and Path(model).is_dir() else {}
    overrides = getattr(arguments, "json_model_override_args", None) or {}
    overrides = json.loads(overrides) if isinstance(overrides, str) else dict(overrides)
    config = {**config, **(config.get("text_config") or {}), **overrides}
    return _text({name: config[name] for name in _ROPE if config.get(name) is not None} or None)


def _shard(config: Any) -> str:
    """"" where there is one. Ranks of a latent model hold the same bytes, and have one."""
    parts = [("tp", config.tp_rank, 1 if config.is_mla_model else config.tp_size)]
    parts += [("pp", config.pp_rank, config.pp_size), ("cp", config.attn_cp_rank, config.attn_cp_size)]
    return ",".join(f"{name}{rank}/{size}" for name, rank, size in parts if size > 1)


def _text(value: Any) -> str:
    """A setting as a string: "" for none."""
    if value is None or value in ({}, ""):
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))
