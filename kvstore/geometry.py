"""The byte layout of a block: offsets, shapes and strides. Numbers only; whoever holds the memory makes tensors of them.

`kv1` is [layer][k, v][head][token][dim]; for latent attention (MLA) [layer][token][latent ‖ rope]. Scales follow after all
elements, in the same order without the dimensions that share one. Any other `format` is an engine's own: its bytes are opaque.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self

from kvstore.dtypes import VALUES_PER_ITEM, item_bytes
from kvstore.errors import GeometryError
from kvstore.hashing import Identity
from kvstore.model_config import read_attention

UNIT_BYTES = 4096  # slots start and end on 4 KiB: the alignment that O_DIRECT and memory maps need
MAX_BLOCK_BYTES = 4 * 2**30  # 4 GiB: 2,048 tokens of 80 layers × 64 heads × 128 in 16 bits are 5; nobody needs a block like that
MAX_COUNT = 2**20  # layers, heads, dims, tokens: none comes near it, and their product stays far inside 128 bits

Granularity = Literal["tensor", "head", "token"]
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "head", "token")


@dataclass(frozen=True)
class TensorView:
    """Where a tensor lies in a slot: `offset_bytes` from the slot's start, `strides_bytes` one per dimension of `shape`."""

    offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Quant:
    """Scales kept with the elements.

    scheme       "symmetric": value = element × scale
    granularity  one scale per "tensor" (the K, or V, of a layer in this block), per "head", or per "token" (of each head)
    scale_dtype  a floating dtype's name
    """

    scheme: str
    granularity: Granularity
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.scheme != "symmetric":
            raise GeometryError(f"quant scheme {self.scheme!r} is unknown; use 'symmetric', or an opaque format for an engine's own")
        if self.granularity not in GRANULARITIES:
            raise GeometryError(f"quant granularity {self.granularity!r} is unknown; use one of {', '.join(GRANULARITIES)}")
        if not self.scale_dtype.startswith(("float", "bfloat")) or VALUES_PER_ITEM.get(self.scale_dtype):
            raise GeometryError(f"scale dtype {self.scale_dtype!r} is not a floating one; use float32, float16 or bfloat16")
        item_bytes(self.scale_dtype)


@dataclass(frozen=True)
class Geometry:
    """The layout of the blocks of one namespace. Raises GeometryError for numbers that describe none.

    kind        "mha" for all attention with K and V per head: "gqa" and "mqa" are accepted and mean it, with fewer heads; or "mla"
    kv_heads    heads in this shard; 0 for mla, like key_dim and value_dim (use `Geometry.mla`)
    key_dim, value_dim, latent_dim, rope_dim    values per token (and head)
    dtype       torch's name of the elements' type
    opaque_block_bytes    only for a `format` other than kv1: the bytes of a block
    """

    kind: str
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    block_tokens: int
    format: str = "kv1"
    quant: Quant | None = None
    latent_dim: int = 0
    rope_dim: int = 0
    opaque_block_bytes: int = 0

    def __post_init__(self) -> None:
        if self.kind in ("gqa", "mqa"):
            object.__setattr__(self, "kind", "mha")
        self._check_counts()
        self._check_dtypes()
        if not self.format or bool(self.opaque_block_bytes) == (self.format == "kv1"):
            raise GeometryError(f"format {self.format!r} with opaque_block_bytes {self.opaque_block_bytes}: kv1 has none, others need it")
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise GeometryError(f"a block has {self.block_bytes} bytes, the most is {MAX_BLOCK_BYTES}; lower block_tokens")

    def _check_counts(self) -> None:
        heads, latent = ("kv_heads", "key_dim", "value_dim"), ("latent_dim",)
        if self.kind not in ("mha", "mla"):
            raise GeometryError(f"attention kind {self.kind!r} is unknown; use mha, gqa, mqa or mla")
        needed, unused = (latent, heads) if self.kind == "mla" else (heads, (*latent, "rope_dim"))
        for name in ("layers", "block_tokens", *needed, "rope_dim", "opaque_block_bytes", *unused):
            value = getattr(self, name)
            if type(value) is not int or value < 0 or (value > MAX_COUNT and name != "opaque_block_bytes"):
                raise GeometryError(f"{name} is {value!r}; give a whole number up to {MAX_COUNT}")
        for name in ("layers", "block_tokens", *needed):
            if getattr(self, name) == 0:
                raise GeometryError(f"{name} is 0; {self.kind} needs at least 1")
        for name in unused:
            if getattr(self, name):
                raise GeometryError(f"{name} is {getattr(self, name)}; {self.kind} has none, so give 0")

    def _check_dtypes(self) -> None:
        item_bytes(self.dtype)
        packed = VALUES_PER_ITEM.get(self.dtype, 1)
        for name in ("key_dim", "value_dim", "latent_dim", "rope_dim"):
            if getattr(self, name) % packed:
                raise GeometryError(f"{name} is {getattr(self, name)}; {self.dtype} stores {packed} values in one item, so give a multiple")
        if self.kind == "mla" and self.quant and self.quant.granularity == "head":
            raise GeometryError("mla has no heads to give scales to; use granularity tensor or token")

    @classmethod
    def mla(cls, *, layers: int, latent_dim: int, rope_dim: int, dtype: str, block_tokens: int) -> Self:
        """Latent attention: one latent and one rotary key per token and layer, whatever the number of heads."""
        return cls("mla", layers, 0, 0, 0, dtype, block_tokens, latent_dim=latent_dim, rope_dim=rope_dim)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], dtype: str | None, block_tokens: int) -> Self:
        """The whole model's geometry from a Hugging Face config.json, parsed. `dtype` None takes the one it names."""
        facts = read_attention(config)
        name = dtype or facts.dtype
        if facts.latent_dim:
            return cls.mla(layers=facts.layers, latent_dim=facts.latent_dim, rope_dim=facts.rope_dim, dtype=name, block_tokens=block_tokens)
        return cls("mha", facts.layers, facts.kv_heads, facts.head_dim, facts.value_dim, name, block_tokens)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's elements in all layers, without scales and padding; what the model itself must remember."""
        return self.layers * self._row_items * item_bytes(self.dtype)

    @property
    def element_bytes(self) -> int:
        """Bytes of a kv1 block's elements, without scales."""
        return self.bytes_per_token * self.block_tokens

    @property
    def scales_offset_bytes(self) -> int:
        """Where the scales start: after all elements, aligned to one scale."""
        return _round_up(self.element_bytes, item_bytes(self.quant.scale_dtype)) if self.quant else self.element_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: elements and scales, or an opaque format's own figure."""
        if self.format != "kv1":
            return self.opaque_block_bytes
        if self.quant is None:
            return self.element_bytes
        parts = 1 if self.kind == "mla" else 2
        scales = self.layers * parts * _product(self._scale_shape)
        return self.scales_offset_bytes + scales * item_bytes(self.quant.scale_dtype)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: a block padded to 4 KiB."""
        return _round_up(self.block_bytes, UNIT_BYTES)

    @property
    def slot_units(self) -> int:
        """A slot's size in units of 4 KiB."""
        return self.slot_bytes // UNIT_BYTES

    def tensor_views(self) -> tuple[dict[str, TensorView], ...]:
        """The tensors of each layer, by name.

        mha: "k" [head, token, key_dim], "v" [head, token, value_dim]; with scales "k_scale" and "v_scale": [], [head] or [head, token]
        mla: "kv" [token, latent ‖ rope], its parts "latent" and "rope"; with scales "kv_scale": [] or [token]
        Raises GeometryError for an opaque format.
        """
        self._require_kv1()
        return tuple(self._layer_views(layer) for layer in range(self.layers))

    def block_view(self) -> TensorView:
        """All elements as one tensor: [layer, 2, head, token, dim], or for mla [layer, token, latent ‖ rope].

        Raises GeometryError for an opaque format, and where keys and values differ in size.
        """
        self._require_kv1()
        if self.key_dim != self.value_dim:
            raise GeometryError(f"keys of {self.key_dim} and values of {self.value_dim} make no one tensor; use tensor_views()")
        if self.kind == "mla":
            shape: tuple[int, ...] = (self.layers, self.block_tokens, self._row_items)
        else:
            shape = (self.layers, 2, self.kv_heads, self.block_tokens, self._items(self.key_dim))
        return _dense(0, shape, self.dtype)

    def scales_view(self) -> TensorView:
        """All scales as one tensor: [layer, 2, ...], or for mla [layer, ...]. Raises GeometryError where there are none."""
        self._require_kv1()
        if self.quant is None:
            raise GeometryError("this geometry has no scales; give it a quant")
        parts = () if self.kind == "mla" else (2,)
        return _dense(self.scales_offset_bytes, (self.layers, *parts, *self._scale_shape), self.quant.scale_dtype)

    @property
    def tokens_apart(self) -> bool:
        """Whether the first tokens of a block can be used without the rest: kv1, and no scale is for several tokens."""
        return self.format == "kv1" and (self.quant is None or self.quant.granularity == "token")

    def with_layers(self, layers: int) -> Self:
        """The same layout for a part of the layers, as a pipeline stage holds."""
        return replace(self, layers=layers)

    def shard(self, tensor_parallel: int, rank: int) -> tuple[Self, int]:
        """What one tensor-parallel rank holds, and its shard's index. Ranks whose bytes are equal get the same index."""
        if self.kind == "mla":
            shard_heads(1, tensor_parallel, rank)
            return self, 0
        share = shard_heads(self.kv_heads, tensor_parallel, rank)
        return replace(self, kv_heads=share.heads), share.index

    def fields(self) -> dict[str, str]:
        """The layout as strings, for a namespace's digest and the wire; `from_fields` reads them back."""
        facts = {name: str(value) for name, value in asdict(self).items() if name not in ("quant", "dtype")}
        quant = "" if self.quant is None else f"{self.quant.scheme}/{self.quant.granularity}/{self.quant.scale_dtype}"
        return {**facts, "kv_dtype": self.dtype, "quant": quant}

    @classmethod
    def from_fields(cls, facts: Mapping[str, str]) -> Self:
        """The layout that `fields` wrote. Other keys are left alone; a missing or malformed one raises GeometryError."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            key = "kv_dtype" if field.name == "dtype" else field.name
            if not isinstance(facts.get(key), str):
                raise GeometryError(f"field {key!r} is missing, or no string; write all that Geometry.fields() gives")
            values[field.name] = _parse_quant(facts[key]) if key == "quant" else facts[key]
            if field.type is int:
                values[field.name] = _parse_count(key, facts[key])
        return cls(**values)

    @property
    def _row_items(self) -> int:
        """Stored items of one token in one layer."""
        if self.kind == "mla":
            return self._items(self.latent_dim) + self._items(self.rope_dim)
        return self.kv_heads * (self._items(self.key_dim) + self._items(self.value_dim))

    @property
    def _scale_shape(self) -> tuple[int, ...]:
        """The shape of one tensor's scales."""
        granularity = self.quant.granularity if self.quant else "tensor"
        heads = () if self.kind == "mla" else (self.kv_heads,)
        return {"tensor": (), "head": heads, "token": (*heads, self.block_tokens)}[granularity]

    def _items(self, dim: int) -> int:
        return dim // VALUES_PER_ITEM.get(self.dtype, 1)

    def _require_kv1(self) -> None:
        if self.format != "kv1":
            raise GeometryError(f"format {self.format!r} is opaque; only the engine that wrote a block knows its tensors")

    def _layer_views(self, layer: int) -> dict[str, TensorView]:
        width = item_bytes(self.dtype)
        start = layer * self._row_items * width * self.block_tokens
        views = {}
        if self.kind == "mla":
            latent, rope = self._items(self.latent_dim), self._items(self.rope_dim)
            views["kv"] = _dense(start, (self.block_tokens, latent + rope), self.dtype)
            strides = views["kv"].strides_bytes
            views["latent"] = TensorView(start, (self.block_tokens, latent), strides, self.dtype)
            views["rope"] = TensorView(start + latent * width, (self.block_tokens, rope), strides, self.dtype)
        else:
            key, value = self._items(self.key_dim), self._items(self.value_dim)
            rows = (self.kv_heads, self.block_tokens)
            views["k"] = _dense(start, (*rows, key), self.dtype)
            views["v"] = _dense(start + _product(rows) * key * width, (*rows, value), self.dtype)
        return views | self._layer_scales(layer)

    def _layer_scales(self, layer: int) -> dict[str, TensorView]:
        if self.quant is None:
            return {}
        names = ("kv_scale",) if self.kind == "mla" else ("k_scale", "v_scale")
        step = _product(self._scale_shape) * item_bytes(self.quant.scale_dtype)
        first = self.scales_offset_bytes + layer * len(names) * step
        return {name: _dense(first + part * step, self._scale_shape, self.quant.scale_dtype) for part, name in enumerate(names)}


@dataclass(frozen=True)
class HeadShare:
    """One rank's part: `heads` of them, in shard `index` of `count`."""

    heads: int
    index: int
    count: int


def shard_heads(heads: int, tensor_parallel: int, rank: int) -> HeadShare:
    """Which KV heads a tensor-parallel rank holds. With more ranks than heads, neighbours hold the same head and one shard.

    Raises GeometryError where neither number divides the other, and for a rank outside 0 .. tensor_parallel-1.
    """
    if heads < 1 or tensor_parallel < 1 or not 0 <= rank < tensor_parallel:
        raise GeometryError(f"rank {rank} of {tensor_parallel} over {heads} heads does not exist; count ranks from 0")
    if heads % tensor_parallel == 0:
        return HeadShare(heads // tensor_parallel, rank, tensor_parallel)
    if tensor_parallel % heads == 0:
        return HeadShare(1, rank // (tensor_parallel // heads), heads)
    raise GeometryError(f"{heads} KV heads over {tensor_parallel} ranks: neither divides the other; choose a divisor or a multiple")


def namespace_fields(tenant: str, identity: Identity, geometry: Geometry, shard: str = "", group: str = "") -> dict[str, str]:
    """The facts of a namespace, for `hashing.namespace_digest`: without adapter and salt, which act through the chain's root.

    `shard` and `group` are names that equal ranks choose equally, "" where there is only one.
    """
    facts = {name: value for name, value in identity.fields().items() if name not in ("adapter", "salt")}
    return {"tenant": tenant, **facts, **geometry.fields(), "shard": shard, "group": group}


def _parse_quant(text: str) -> Quant | None:
    if not text:
        return None
    parts = text.split("/")
    if len(parts) != 3:
        raise GeometryError(f"quant {text!r} is malformed; write scheme/granularity/scale_dtype")
    granularity = next((name for name in GRANULARITIES if name == parts[1]), None)
    if granularity is None:
        raise GeometryError(f"quant granularity {parts[1]!r} is unknown; use one of {', '.join(GRANULARITIES)}")
    return Quant(parts[0], granularity, parts[2])


def _parse_count(name: str, text: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,17}", text):
        raise GeometryError(f"{name} is {text!r}; write a whole number in plain decimal digits")
    return int(text)


def _dense(offset_bytes: int, shape: tuple[int, ...], dtype: str) -> TensorView:
    strides, step = [], item_bytes(dtype)
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorView(offset_bytes, shape, tuple(reversed(strides)), dtype)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
