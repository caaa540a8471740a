"""What the store must know of a transformers model: its identity, and how its cache's layers lie in a block. Needs torch."""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicLayer

from kvstore.clients.arena import Bytes
from kvstore.errors import GeometryError, InvalidArgument
from kvstore.geometry import Geometry, TensorView
from kvstore.hashing import Identity
from kvstore.model_config import position_facts

# Facts of a configuration that say where or by what it was written; the model computes the same whatever they are.
_VOLATILE = ("_name_or_path", "transformers_version")
SAMPLED_WEIGHTS = 256  # about so many weights of a model are looked into to see whether any has changed


@dataclass(frozen=True)
class Layout:
    """Which layers of a cache hold keys and values, in order, and how those of a block lie in its bytes."""

    layers: tuple[int, ...]
    geometry: Geometry

    def halves(self, block: Bytes) -> tuple[Tensor, Tensor]:
        """The keys and the values of one block, each [layer, head, token, dim], without a copy. Not to be written in a lease's block."""
        keys, values = self._views
        return _as_tensor(block, keys), _as_tensor(block, values)

    def empty(self, batch: int, columns: int) -> list[Tensor]:
        """Memory for keys and for values [layer, batch, head, column, dim]."""
        dtype, heads = getattr(torch, self.geometry.dtype), max(self.geometry.kv_heads, 1)
        return [torch.empty((len(self.layers), batch, heads, columns, dim), dtype=dtype) for dim in self._dims]

    def columns(self, cache: DynamicCache, row: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [layer, head, column, dim] of some columns of one row, in host memory."""
        layers = [cast(Any, cache.layers[index]) for index in self.layers]
        keys = torch.stack([layer.keys[row, :, start:stop] for layer in layers])
        return keys.cpu(), torch.stack([layer.values[row, :, start:stop] for layer in layers]).cpu()

    def check(self, cache: DynamicCache, batch: int) -> None:
        """Raise InvalidArgument unless the cache has `batch` rows, and its layers are what this layout was made of."""
        heads, tokens = max(self.geometry.kv_heads, 1), cache.get_seq_length()
        for index in self.layers:
            layer = cast(Any, cache.layers[index])
            for part, dim in zip((layer.keys, layer.values), self._dims, strict=True):
                found = "nothing" if part is None else f"{part.dtype} {tuple(part.shape)}"
                wanted = f"torch.{self.geometry.dtype} {(batch, heads, tokens, dim)}"
                if found != wanted:
                    raise InvalidArgument(f"layer {index} of the cache holds {found}, not {wanted}; store a cache that this model filled")

    @property
    def _dims(self) -> tuple[int, int]:
        geometry = self.geometry
        return (geometry.latent_dim, geometry.rope_dim) if geometry.kind == "mla" else (geometry.key_dim, geometry.value_dim)

    @functools.cached_property
    def _views(self) -> tuple[TensorView, TensorView]:
        """Where the keys, and the values, of all layers lie in a block: [layer, head, token, dim]."""
        views = self.geometry.tensor_views()
        found = []
        for name in ("latent", "rope") if self.geometry.kind == "mla" else ("k", "v"):
            view = views[0][name]
            step_bytes = views[1][name].offset_bytes - view.offset_bytes if len(views) > 1 else 0
            heads = 3 - len(view.shape)  # a latent one has no dimension for them
            shape = (len(views), *(1,) * heads, *view.shape)
            found.append(TensorView(view.offset_bytes, shape, (step_bytes, *(0,) * heads, *view.strides_bytes), view.dtype))
        return found[0], found[1]


def layout_of(model: PreTrainedModel, block_tokens: int) -> Layout:
    """How this model's cache lies in blocks, learnt from a forward pass of one token.

    Raises InvalidArgument for a model whose cache is not keys and values of every token, GeometryError where its layers differ.
    """
    _refuse_others(model)
    cache = _probe(model)
    layers, shapes = [], set()
    for index, layer in enumerate(cache.layers):
        if type(layer) is DummyLayer:  # it reads another layer's keys and values
            continue
        keys, values = cast(Any, layer).keys, cast(Any, layer).values
        layers.append(index)
        shapes.add((keys.shape[1], keys.shape[3], values.shape[3], str(keys.dtype), str(values.dtype)))
    if len(shapes) != 1:
        raise GeometryError(f"the layers of this model's cache differ ({sorted(shapes)}): it cannot be shared; run it without the store")
    ((heads, key_dim, value_dim, dtype, value_dtype),) = shapes
    if dtype != value_dtype:
        raise GeometryError(f"keys are {dtype} and values {value_dtype}: such a cache cannot be shared; run it without the store")
    name = dtype.removeprefix("torch.")
    latent, rope = (getattr(model.config, fact, None) for fact in ("kv_lora_rank", "qk_rope_head_dim"))
    if heads == 1 and (key_dim, value_dim) == (latent, rope):
        made = Geometry.mla(layers=len(layers), latent_dim=key_dim, rope_dim=value_dim, dtype=name, block_tokens=block_tokens)
    else:
        made = Geometry("mha", len(layers), heads, key_dim, value_dim, name, block_tokens)
    return Layout(tuple(layers), made)


def identity_of(model: PreTrainedModel, *, name: str = "", revision: str = "", adapter: str = "", salt: str = "") -> Identity:
    """The facts under which this model's keys and values may be used again.

    name       shown to operators; its class's name where none is given
    revision   a name of the weights that cannot move, a commit say; where none is given, a digest of the weights in memory and the
               configuration: a second or two a gigabyte, and equal in every process that has the same
    """
    return Identity(
        model=name or type(model).__name__,
        revision=revision or _revision(model),
        adapter=adapter,
        position=position_facts(model.config),
        dtype=str(model.dtype).removeprefix("torch."),
        salt=salt,
    )


def check_fits(identity: Identity, model: PreTrainedModel) -> None:
    """Raise InvalidArgument where a given identity says something else than the model in memory."""
    for fact, found in (("dtype", str(model.dtype).removeprefix("torch.")), ("position", position_facts(model.config))):
        if getattr(identity, fact) != found:
            raise InvalidArgument(f"the identity's {fact} is {getattr(identity, fact)!r}, the model's {found!r}; give the model's")


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether adapters are attached, one of which may be active at one call and not at the next."""
    return bool(getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "peft_config", None))


def weights_now(model: PreTrainedModel) -> frozenset[tuple[object, ...]]:
    """What tells cheaply whether weights or buffers have changed: where each lies, its version, type and shape, and the middle element.

    The element of some hundreds of them at most, evenly chosen: a mixture of experts has ten thousands. A version counts what autograd
    sees. What goes past it, as `weight.data += ...` does, shows in the element. Not of adapters: their digest is given at each call.
    """
    adapters = _adapter_weights(model) if has_adapters(model) else set()
    weights = [each for each in (*model.parameters(), *model.buffers()) if id(each) not in adapters]
    every = max(1, len(weights) // SAMPLED_WEIGHTS)
    facts: list[tuple[object, ...]] = []
    samples: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    with torch.no_grad():
        for number, weight in enumerate(weights):
            plain = weight.detach()
            where: tuple[object, ...] = ()
            if weight.device.type != "meta":  # those that come from elsewhere for each pass are other tensors every time
                where = (0 if weight.is_inference() else weight._version, weight.data_ptr())
            facts.append((weight.dtype, weight.shape, *where))
            if number % every == 0 and where and weight.numel() and type(plain) is Tensor and plain.layout is torch.strided:
                middle = sum(size // 2 * step for size, step in zip(plain.shape, plain.stride(), strict=True))
                sample = plain.as_strided((1,), (1,), plain.storage_offset() + middle)
                samples.setdefault((plain.device, plain.dtype), []).append((len(facts) - 1, sample))
        for (_, dtype), group in samples.items():
            values = torch.cat([sample for _, sample in group]).view(torch.uint8).cpu().numpy().reshape(-1, dtype.itemsize)
            for (index, _), value in zip(group, values, strict=True):
                facts[index] += (value.tobytes(),)
    return frozenset(facts)


def same_weights(model: PreTrainedModel, then: frozenset[tuple[object, ...]]) -> bool:
    """Whether the model still has the weights of which `weights_now` gave `then`; adapters may have come beside them."""
    now = weights_now(model)
    return then <= now if has_adapters(model) else then == now


def padding_ids(model: PreTrainedModel) -> list[int]:
    """The ids with which `generate` fills up the rows that ended before others."""
    settings = model.generation_config
    for name in ("pad_token_id", "eos_token_id"):
        found = getattr(settings, name, None)
        if found is not None:
            return [int(token) for token in (found if isinstance(found, list) else [found])]
    return []


def _adapter_weights(model: PreTrainedModel) -> set[int]:
    """The ids of the parameters that adapters brought, by what their layers say of themselves."""
    parts = (getattr(module, name, None) for module in model.modules() for name in getattr(module, "adapter_layer_names", ()))
    return {id(weight) for part in parts if isinstance(part, torch.nn.Module) for weight in (*part.parameters(), *part.buffers())}


def _as_tensor(block: Bytes, view: TensorView) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        whole = torch.from_numpy(block)
    width = getattr(torch, view.dtype).itemsize
    items = whole[: len(whole) // width * width].view(getattr(torch, view.dtype))
    return items.as_strided(view.shape, [stride // width for stride in view.strides_bytes], view.offset_bytes // width)


def _refuse_others(model: PreTrainedModel) -> None:
    config, kind = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or not model.can_generate():
        raise InvalidArgument(f"{kind} is no decoder that generates from a prompt alone; run it without the store")
    if config.get_text_config(decoder=True) is not config:
        raise InvalidArgument(f"{kind} is multimodal: its token ids do not say what an image adds; share its language model alone")
    try:
        layers: Sequence[Any] = DynamicCache(config=config).layers
    except KeyError as error:
        raise InvalidArgument(f"{kind} has layers of type {error}, whose cache is not known; run it without the store") from None
    others = sorted({type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DummyLayer)})
    if others:
        raise InvalidArgument(
            f"{kind} keeps {', '.join(others)}: not keys and values of every token, but a window, a state, or something beside them; "
            "only full attention can be shared, so run this model without the store"
        )


def _probe(model: PreTrainedModel) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        cast(Any, model)(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), cache=cache, use_cache=True)
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DummyLayer and cast(Any, layer).get_seq_length() != 1:
            raise InvalidArgument(f"{type(model).__name__} did not fill layer {index} of its cache; run it without the store")
    return cache


def _revision(model: PreTrainedModel) -> str:
    """One digest over the configuration and every weight; tied weights count once."""
    facts = {name: value for name, value in model.config.to_dict().items() if name not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
    seen: dict[tuple[int, torch.Size], str] = {}
    for name, weight in sorted(model.state_dict().items()):
        if weight.device.type == "meta":
            raise InvalidArgument(f"weight {name} is not in memory, so no digest can name it; give an identity with a revision")
        first = seen.setdefault((weight.data_ptr(), weight.shape), name)
        digest.update(f"\n{name} {first} {weight.dtype} {tuple(weight.shape)}\n".encode())
        if first == name and weight.numel():
            digest.update(memoryview(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return "sha256:" + digest.hexdigest()
