"""What decides whether two vLLM engines may share offloaded chunks: all that an offloading tier is told, and what its settings add."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.digests import config_text, files_digest
from kvstore.errors import ConfigError
from kvstore.geometry import Geometry
from kvstore.hashing import Identity

FORMAT = "vllm-offload-"  # how the formats of its chunks begin, which it names by hashes of its own


@dataclass(frozen=True)
class TierFacts:
    """A chunk: the bytes of all ranks side by side, in the engine's own layout, opaque to the store."""

    identity: Identity
    geometry: Geometry


def facts_of(config: Any, device: str, version: str, chunk_bytes: int, revision: str, layout: str) -> TierFacts:
    """The facts of vLLM's OffloadingConfig.

    device       the platform's name;  version  vLLM's;  chunk_bytes  of one chunk with its padding
    revision     names the weights, and whatever else changes what the model computes (overrides, quantization);
                 "" takes the digest of the model's folder
    layout       names what a page's bytes depend on and the tier is not told: the attention backend
    Raises ConfigError where they do not say enough.
    """
    if device == "cpu" and not layout:
        raise ConfigError("on a CPU use KVStoreConnector: this tier is not told for which instruction set the engine packs its keys")
    model = str(config.model.name)
    tokens = config.cache.tokens_per_hash
    facts = {
        "groups": [[group.tokens_per_block, *group.layer_names] for group in config.groups],
        "tokens_per_hash": tokens,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "parallel": [getattr(config.parallel, name) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")],
        "layouts": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout, layout],
        "device": device,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    geometry = Geometry(
        kind="mha",
        layers=max(sum(len(group.layer_names) for group in config.groups), 1),
        kv_heads=1,  # heads, dimensions and element type are the engine's affair: a chunk is bytes
        key_dim=1,
        value_dim=1,
        dtype="uint8",
        block_tokens=max(group.tokens_per_block for group in config.groups) * config.cache.blocks_per_chunk,
        format=f"{FORMAT}{version}/{digest[:32]}",
        opaque_block_bytes=chunk_bytes,
    )
    identity = Identity(
        model=Path(model).name,
        revision=revision or _weights(Path(model)),
        tokenizer="",
        dtype=str(config.model.dtype).removeprefix("torch."),
    )
    return TierFacts(identity, geometry)


def _weights(folder: Path) -> str:
    files = (sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))) if folder.is_dir() else []
    if not files:
        raise ConfigError(f"model {folder}: nothing says which weights these are; give the tier a 'revision'")
    return files_digest(files, {"config": config_text(folder)})
