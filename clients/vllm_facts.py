"""What decides whether two vLLM engines may share keys and values: the model's identity, and how a worker's blocks are made up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvstore.clients.requests import KEEP_ALL, Keep
from kvstore.clients.vllm_device import DevicePages, Gpu
from kvstore.clients.vllm_pages import EnginePages, Pages
from kvstore.clients.vllm_plan import GroupFacts, WorkerFacts
from kvstore.clients.vllm_residency import Member
from kvstore.digests import files_digest
from kvstore.errors import ConfigError, KVStoreError
from kvstore.geometry import Geometry, shard_heads
from kvstore.hashing import Identity
from kvstore.kernels.driver import LibCuda
from kvstore.model_config import position_facts

# Facts in a configuration that say where or by what it was written; the model computes the same whatever they are.
_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash")
# Kinds of vLLM's KV cache groups whose blocks say all, by the names of their classes: what a kind derived from one keeps is not known here.
_WHOLE, _WINDOWED = ("FullAttentionSpec", "MLAAttentionSpec"), "SlidingWindowSpec"
_GPU = "gpu"  # the setting without which keys and values in a GPU's memory are not shared
PagesOf = Callable[[Mapping[str, torch.Tensor]], EnginePages]
_APART = "start vLLM with --disable-hybrid-kv-cache-manager"


def identity_of(config: Any, revision: str) -> Identity:
    """The model facts of a VllmConfig; `revision` names the weights where it is given.

    Raises ConfigError where nothing says which weights they are, InvalidArgument for a model whose keys cannot be used again.
    """
    model = config.model_config
    name, weights = _weights(config, revision)
    facts = {"weights": weights, "config": _config_digest(model.hf_config), "quantization": str(model.quantization)}
    return Identity(
        model=name,
        revision=json.dumps(facts, sort_keys=True, separators=(",", ":")),
        position=position_facts(model.hf_text_config),
        dtype=f"{_name(model.dtype)}/kv-{config.cache_config.cache_dtype}",
    )


def _weights(config: Any, revision: str) -> tuple[str, str]:
    """A name that engines with the same weights share, and what says which they are."""
    model = config.model_config
    folder = Path(model.model)
    if config.load_config.load_format == "dummy":
        return folder.name, "dummy"
    if revision:
        return folder.name, revision
    if folder.is_dir():
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        if files:
            return folder.name, files_digest(files)
    if commit := getattr(model.hf_config, "_commit_hash", None):
        return str(model.model), str(commit)
    raise ConfigError(f"model {model.model}: nothing says which weights these are; give kv_connector_extra_config a 'revision'")


def _config_digest(hf_config: Any) -> str:
    facts = {name: value for name, value in hf_config.to_dict().items() if name not in _VOLATILE}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def members_of(identity: Identity, facts: Iterable[WorkerFacts]) -> list[Member]:
    """What opens the namespaces that the engine needs together, in the order of `StepPlan.shards`. `facts` of its workers, by rank."""
    return [
        Member(identity, geometry_of(group), each.shard, group.name, keep_of(group))
        for each in {each.shard: each for each in facts}.values()
        for group in each.groups
    ]


def keep_of(facts: GroupFacts) -> Keep:
    """What of a sequence the group's layers look at."""
    return Keep("window", facts.window_tokens) if facts.window_tokens else KEEP_ALL


def geometry_of(facts: GroupFacts) -> Geometry:
    """The layout of one worker's blocks of a group: the engine's own, opaque to the store."""
    return Geometry(
        kind="mha",
        layers=facts.layers,
        kv_heads=facts.kv_heads,
        key_dim=facts.head_items,
        value_dim=facts.head_items,
        dtype=facts.dtype,
        block_tokens=facts.block_tokens,
        format=facts.format,
        opaque_block_bytes=facts.block_bytes,
    )


def facts_of(
    config: Any, groups: Sequence[Any], tensors: Mapping[str, torch.Tensor], ranks: tuple[int, int], pages_of: PagesOf
) -> tuple[WorkerFacts, list[EnginePages]]:
    """What one worker holds, and its pages by KV cache group; where it cannot take part, its `refusal` says why and there are none.

    groups  vLLM's KVCacheGroupSpecs;  tensors  per layer;  ranks  this worker's (pipeline, tensor) ranks;  pages_of  see `pages_for`
    """
    try:
        _check_supported(config)
        windows = [_window_of(group.kv_cache_spec) for group in groups]
        if len({group.kv_cache_spec.block_size for group in groups}) > 1:
            raise ConfigError(f"the model's KV cache groups have blocks of different lengths; {_APART}")
        mine = [{name: tensors[name] for name in group.layer_names if name in tensors} for group in groups]
        pages = [pages_of(each) for each in (mine if len(groups) > 1 else [tensors])]
        facts = tuple(
            _facts(config, next(iter(each.values())), page, name, window)
            for each, page, name, window in zip(mine, pages, _names(groups), windows, strict=True)
        )
        for each in facts:
            geometry_of(each)
    except KVStoreError as error:
        return WorkerFacts(refusal=str(error)), []
    return WorkerFacts(facts, _shard(config, ranks)), pages


def pages_for(gpu: bool) -> PagesOf:
    """What makes pages of a group's tensors, wherever they lie. `gpu`: in a GPU's memory too, which has not been tried on one."""
    known: list[Gpu] = []  # a worker has one

    def pages_of(tensors: Mapping[str, torch.Tensor]) -> EnginePages:
        device = getattr(next(iter(tensors.values()), None), "device", None)
        if device is None or device.type != "cuda":
            return Pages(tensors)
        if not gpu:
            raise ConfigError(
                f"KV tensors are on {device}, and sharing them has not been tried on a GPU yet: set {_GPU!r} to true in "
                "kv_connector_extra_config to try it, or use the tier (KVStoreTier)"
            )
        if not known:
            known.append(Gpu(LibCuda(), device.index or 0))
        return DevicePages(tensors, known[0])

    return pages_of


def _window_of(spec: Any) -> int:
    """How many tokens before the next one the layers of a KV cache group look at, 0 for all. Raises ConfigError for kinds not shared."""
    spec = getattr(spec, "first_spec", spec)
    kind = type(spec).__name__
    if kind == _WINDOWED:
        return max(int(spec.sliding_window) - 1 + int(getattr(spec, "extra_retained_tokens", 0)), 1)
    if kind not in _WHOLE:
        raise ConfigError(f"the model has a KV cache group of kind {kind}, which is not shared yet; {_APART} if the model allows it")
    return 0


def _names(groups: Sequence[Any]) -> list[str]:
    """Of each KV cache group: which of them it is, and of which layers. "" where there is one."""
    if len(groups) == 1:
        return [""]
    digests = [hashlib.sha256("\n".join(group.layer_names).encode()).hexdigest()[:12] for group in groups]
    return [f"{at}/{len(groups)}:{digest}" for at, digest in enumerate(digests)]


def _check_supported(config: Any) -> None:
    parallel = config.parallel_config
    speculative = config.speculative_config
    # vLLM 0.32 turns its own prefix cache off for these: its CPU kernels give other results after a prefix than without.
    on_cpu = config.device_config.device_type == "cpu"
    latent_on_cpu = config.model_config.use_mla and on_cpu and not config.cache_config.enable_prefix_caching
    for wrong, text in (
        (parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1, "context parallelism is not shared yet"),
        (speculative is not None and speculative.use_eagle(), "drafts that read the model's own states (eagle, mtp) are not shared yet"),
        (latent_on_cpu, "vLLM's CPU backend does not use prefixes with latent attention (MLA), not its own either"),
        (getattr(config.cache_config, "calculate_kv_scales", False), "KV scales measured at run time are not shared; give fixed ones"),
    ):
        if wrong:
            raise ConfigError(text)


def _facts(config: Any, tensor: torch.Tensor, pages: EnginePages, name: str, window: int) -> GroupFacts:
    import vllm

    heads, items = (int(tensor.shape[1]), int(tensor.shape[3])) if tensor.dim() == 4 else (1, int(tensor.shape[-1]))
    backends = "+".join(sorted(_backends(config)))
    return GroupFacts(
        format=f"vllm-{vllm.__version__}/{backends}/{_instruction_set(config, items)}/{pages.layout}",
        block_bytes=pages.block_bytes,
        block_tokens=config.cache_config.block_size,
        layers=pages.layers,
        kv_heads=heads,
        head_items=items,
        dtype=_name(tensor.dtype),
        name=name,
        window_tokens=window,
    )


def _shard(config: Any, ranks: tuple[int, int]) -> str:
    """"" where there is one; ranks that hold the same heads, or the same latents, have one shard."""
    parallel, model = config.parallel_config, config.model_config
    stages = parallel.pipeline_parallel_size
    pipeline = f"pp{ranks[0]}/{stages}" if stages > 1 else ""
    if model.use_mla or parallel.tensor_parallel_size == 1:
        return pipeline
    share = shard_heads(model.get_total_num_kv_heads(), parallel.tensor_parallel_size, ranks[1])
    return ",".join(part for part in (f"tp{share.index}/{share.count}", pipeline) if part)


def _backends(config: Any) -> Iterable[str]:
    layers = config.compilation_config.static_forward_context.values()
    return {str(layer.get_attn_backend().get_name()) for layer in layers if hasattr(layer, "get_attn_backend")}


def _instruction_set(config: Any, items: int) -> str:
    """Which instruction set the CPU backend packs keys for: two kinds of processor do not read each other's."""
    if config.device_config.device_type != "cpu":
        return str(config.device_config.device_type)
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache = config.cache_config
    return str(_get_attn_isa(config.model_config.dtype, cache.block_size, items // 2, cache.cache_dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
