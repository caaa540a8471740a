"""The byte layout of a block, checked against tensors laid over real bytes."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.dtypes import ITEM_BYTES
from kvstore.errors import GeometryError
from kvstore.geometry import Geometry, Quant, TensorView, namespace_fields, shard_heads
from kvstore.hashing import Identity, namespace_digest

NUMPY_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by item size: only places matter here, not values

small = st.integers(1, 5)
float_types = st.sampled_from([name for name in ITEM_BYTES if name != "float4_e2m1fn_x2"])
scale_types = st.sampled_from(["float64", "float32", "float16", "bfloat16", "float8_e8m0fnu"])
head_quants = st.none() | st.builds(Quant, st.just("symmetric"), st.sampled_from(["tensor", "head", "token"]), scale_types)
latent_quants = st.none() | st.builds(Quant, st.just("symmetric"), st.sampled_from(["tensor", "token"]), scale_types)
with_heads = st.builds(Geometry, st.just("mha"), small, small, small, small, float_types, small, quant=head_quants)
with_latent = st.builds(
    Geometry, st.just("mla"), small, st.just(0), st.just(0), st.just(0), float_types, small,
    quant=latent_quants, latent_dim=small, rope_dim=st.integers(0, 3),
)  # fmt: skip
geometries = st.one_of(with_heads, with_latent)


def _over(slot: np.ndarray[Any, Any], view: TensorView) -> np.ndarray[Any, Any]:
    """The view as an array over the slot's own bytes."""
    dtype = NUMPY_TYPES[ITEM_BYTES[view.dtype]]
    return np.ndarray(view.shape, dtype, slot, view.offset_bytes, view.strides_bytes)


def _llama(**changes: Any) -> Geometry:
    heads: dict[str, Any] = {"kind": "gqa", "layers": 32, "kv_heads": 8, "key_dim": 128, "value_dim": 128}
    return Geometry(**(heads | {"dtype": "float16", "block_tokens": 16} | changes))


@given(geometries)
def test_views_cover_each_byte_of_a_block_once(geometry: Geometry) -> None:
    slot = np.zeros(geometry.slot_bytes, np.uint8)
    for views in geometry.tensor_views():
        for name, view in views.items():
            if name not in ("latent", "rope"):
                tensor = _over(slot, view).view(np.uint8) if view.shape else _over(slot, view).reshape(1).view(np.uint8)
                tensor += 1
    gap = slice(geometry.element_bytes, geometry.scales_offset_bytes)
    assert (slot[: geometry.block_bytes] == 1).sum() == geometry.block_bytes - (gap.stop - gap.start)
    assert not slot[gap].any()
    assert not slot[geometry.block_bytes :].any()


@given(geometries)
def test_a_slot_is_a_block_padded_to_4_kib(geometry: Geometry) -> None:
    assert geometry.slot_bytes % 4096 == 0
    assert 0 <= geometry.slot_bytes - geometry.block_bytes < 4096
    assert geometry.slot_units * 4096 == geometry.slot_bytes


@given(geometries)
def test_a_geometry_survives_its_fields(geometry: Geometry) -> None:
    assert Geometry.from_fields(geometry.fields()) == geometry


@given(geometries, geometries)
def test_other_geometries_have_other_fields(one: Geometry, two: Geometry) -> None:
    assert (one.fields() == two.fields()) == (one == two)


@given(geometries)
def test_layer_views_are_rows_of_the_block_view(geometry: Geometry) -> None:
    if geometry.key_dim != geometry.value_dim:
        return
    slot = np.arange(geometry.slot_bytes, dtype=np.uint32).astype(np.uint8)
    block = _over(slot, geometry.block_view())
    for layer, views in enumerate(geometry.tensor_views()):
        if geometry.kind == "mla":
            assert (_over(slot, views["kv"]) == block[layer]).all()
            assert (_over(slot, views["latent"]) == block[layer, :, : geometry.latent_dim]).all()
            assert (_over(slot, views["rope"]) == block[layer, :, geometry.latent_dim :]).all()
        else:
            assert (_over(slot, views["k"]) == block[layer, 0]).all()
            assert (_over(slot, views["v"]) == block[layer, 1]).all()


@given(geometries.filter(lambda geometry: geometry.quant is not None))
def test_layer_scales_are_rows_of_the_scales_view(geometry: Geometry) -> None:
    slot = np.arange(geometry.slot_bytes, dtype=np.uint32).astype(np.uint8)
    scales = _over(slot, geometry.scales_view())
    assert geometry.scales_view().offset_bytes % ITEM_BYTES[geometry.scales_view().dtype] == 0
    for layer, views in enumerate(geometry.tensor_views()):
        if geometry.kind == "mla":
            assert (_over(slot, views["kv_scale"]) == scales[layer]).all()
        else:
            assert (_over(slot, views["k_scale"]) == scales[layer, 0]).all()
            assert (_over(slot, views["v_scale"]) == scales[layer, 1]).all()


def test_kv1_is_layer_then_kv_then_head_then_token() -> None:
    view = _llama().block_view()
    assert view.shape == (32, 2, 8, 16, 128)
    assert view.strides_bytes == (65_536, 32_768, 4_096, 256, 2)
    assert _llama().tensor_views()[3]["v"] == TensorView(3 * 65_536 + 32_768, (8, 16, 128), (4_096, 256, 2), "float16")


def test_gqa_and_mqa_are_mha_with_fewer_heads() -> None:
    assert _llama(kind="gqa") == _llama(kind="mha")
    assert _llama(kind="mqa", kv_heads=1) == _llama(kind="mha", kv_heads=1)


def test_every_floating_type_of_torch_has_its_size() -> None:
    torch = pytest.importorskip("torch")
    kinds = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    floating = {name: kind.itemsize for name, kind in kinds.items() if kind.is_floating_point}
    assert floating.items() <= ITEM_BYTES.items()


def test_packed_4_bit_values_take_half_a_byte() -> None:
    packed = _llama(dtype="float4_e2m1fn_x2")
    assert packed.bytes_per_token == _llama(dtype="int8").bytes_per_token // 2
    assert packed.block_view().shape == (32, 2, 8, 16, 64)
    with pytest.raises(GeometryError, match="multiple"):
        _llama(dtype="float4_e2m1fn_x2", key_dim=127)


@pytest.mark.parametrize(("granularity", "scales"), [("tensor", 2), ("head", 16), ("token", 256)])
def test_scales_are_counted_by_their_granularity(granularity: Any, scales: int) -> None:
    geometry = _llama(dtype="int8", quant=Quant("symmetric", granularity))
    assert geometry.block_bytes == geometry.element_bytes + 32 * scales * 4


def test_an_engines_format_is_opaque() -> None:
    geometry = _llama(format="vllm/LBHNC", opaque_block_bytes=5000)
    assert (geometry.block_bytes, geometry.slot_bytes) == (5000, 8192)
    assert geometry.bytes_per_token == _llama().bytes_per_token
    for view in (geometry.tensor_views, geometry.block_view, geometry.scales_view):
        with pytest.raises(GeometryError, match="opaque"):
            view()


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float12"}, {"dtype": ""}, {"dtype": "torch.float16"}, {"kind": "linear"},
        {"layers": 0}, {"kv_heads": 0}, {"key_dim": 0}, {"value_dim": 0}, {"block_tokens": 0},
        {"layers": -1}, {"layers": 2**40}, {"kv_heads": 1.5}, {"kv_heads": True}, {"block_tokens": "16"},
        {"latent_dim": 512}, {"rope_dim": 64}, {"kind": "mla"}, {"kind": "mla", "latent_dim": 512},
        {"layers": 80, "kv_heads": 64, "block_tokens": 2048}, {"format": ""}, {"format": "engine"},
        {"opaque_block_bytes": 4096}, {"format": "engine", "opaque_block_bytes": 2**40}, {"format": "engine", "opaque_block_bytes": -1},
    ],
)  # fmt: skip
def test_numbers_that_describe_no_block_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(GeometryError):
        _llama(**changes)


@pytest.mark.parametrize(
    "parts",
    [("asymmetric", "head", "float32"), ("symmetric", "row", "float32"), ("symmetric", "head", "int8"), ("symmetric", "head", "floaty")],
)
def test_a_quant_that_is_unknown_is_refused(parts: tuple[Any, Any, Any]) -> None:
    with pytest.raises(GeometryError):
        Quant(*parts)


def test_latent_attention_has_no_scales_per_head() -> None:
    with pytest.raises(GeometryError, match="no heads"):
        Geometry("mla", 1, 0, 0, 0, "int8", 16, quant=Quant("symmetric", "head"), latent_dim=512, rope_dim=64)


def test_keys_and_values_of_other_sizes_make_no_block_view() -> None:
    with pytest.raises(GeometryError, match="tensor_views"):
        _llama(key_dim=192).block_view()


def test_a_geometry_without_scales_has_no_scales_view() -> None:
    with pytest.raises(GeometryError, match="no scales"):
        _llama().scales_view()


@pytest.mark.parametrize(
    ("name", "value"),
    [("layers", "032"), ("layers", "-1"), ("layers", "+1"), ("layers", ""), ("layers", "9" * 5000), ("layers", "３２"),
     ("quant", "symmetric/head"), ("quant", "symmetric/row/float32"), ("kv_dtype", "half"),
     ("layers", 32), ("layers", None), ("quant", 5), ("kv_dtype", []), ("format", {})],
)  # fmt: skip
def test_malformed_fields_are_refused(name: str, value: Any) -> None:
    with pytest.raises(GeometryError):
        Geometry.from_fields(_llama().fields() | {name: value})


def test_a_missing_field_is_named() -> None:
    facts = _llama().fields()
    del facts["kv_heads"]
    with pytest.raises(GeometryError, match="kv_heads"):
        Geometry.from_fields(facts)


@given(st.integers(1, 64), st.integers(1, 64))
def test_heads_are_refused_only_where_neither_divides(heads: int, ranks: int) -> None:
    if heads % ranks and ranks % heads:
        with pytest.raises(GeometryError, match="neither"):
            shard_heads(heads, ranks, 0)
        return
    shares = [shard_heads(heads, ranks, rank) for rank in range(ranks)]
    assert {share.index for share in shares} == set(range(shares[0].count))
    assert sum(share.heads for share in shares) == max(heads, ranks)
    assert [share.index for share in shares] == sorted(share.index for share in shares)


@pytest.mark.parametrize(("heads", "ranks", "rank"), [(8, 4, 4), (8, 4, -1), (8, 0, 0), (0, 1, 0)])
def test_a_rank_that_does_not_exist_is_refused(heads: int, ranks: int, rank: int) -> None:
    with pytest.raises(GeometryError, match="count ranks"):
        shard_heads(heads, ranks, rank)


def test_ranks_that_hold_equal_bytes_share_a_namespace() -> None:
    identity = Identity(model="m")
    digests = []
    for rank in range(16):
        geometry, shard = _llama().shard(16, rank)
        digests.append(namespace_digest(namespace_fields("t", identity, geometry, str(shard))))
    assert [len(set(digests[2 * head : 2 * head + 2])) for head in range(8)] == [1] * 8
    assert len(set(digests)) == 8
    latent = Geometry.mla(layers=61, latent_dim=512, rope_dim=64, dtype="bfloat16", block_tokens=64)
    assert {latent.shard(8, rank) for rank in range(8)} == {(latent, 0)}


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "bfloat16"}, {"dtype": "float8_e4m3fn"}, {"block_tokens": 32}, {"quant": Quant("symmetric", "head")}, {"layers": 31}],
)
def test_another_geometry_is_another_namespace(changes: dict[str, Any]) -> None:
    identity = Identity(model="m", dtype="float16")
    one, two = (namespace_digest(namespace_fields("t", identity, geometry)) for geometry in (_llama(), _llama(**changes)))
    assert one != two


def test_adapter_and_salt_make_no_namespace() -> None:
    plain, adapted = Identity(model="m"), Identity(model="m", adapter="a", salt="s")
    assert namespace_fields("t", plain, _llama()) == namespace_fields("t", adapted, _llama())


@pytest.mark.parametrize("name", ["model", "revision", "tokenizer", "position", "dtype"])
def test_every_other_fact_makes_a_namespace(name: str) -> None:
    assert namespace_fields("t", Identity(), _llama()) != namespace_fields("t", Identity(**{name: "x"}), _llama())
    assert namespace_fields("t", Identity(), _llama()) != namespace_fields("u", Identity(), _llama())
