"""The capacity ledger, against figures that can be worked out by hand or are published."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.capacity import bytes_ratio, ledger, memory_share, query_key_pairs, split, stage_layers
from kvstore.errors import GeometryError, InvalidArgument
from kvstore.geometry import Geometry, Quant

MIB, GIB = 2**20, 2**30  # bytes


def _heads(layers: int, kv_heads: int, dtype: str = "float16") -> Geometry:
    return Geometry("gqa", layers, kv_heads, 128, 128, dtype, 16)


LLAMA_8B = _heads(32, 8)
LLAMA_70B = _heads(80, 8)
MISTRAL_7B = _heads(32, 8, "bfloat16")


def test_a_token_of_llama_8b_takes_128_kib() -> None:
    assert LLAMA_8B.bytes_per_token == 131_072


def test_mistral_7b_takes_4_gib_at_32_768_tokens() -> None:
    assert ledger(MISTRAL_7B, [32_768]).effective_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("tokens", "gib"),
    [(1_024, 0.3125), (4_096, 1.25), (8_192, 2.5), (32_768, 10.0), (131_072, 40.0), (1_048_576, 320.0)],
)
def test_llama_70b_grows_with_its_context(tokens: int, gib: float) -> None:
    assert ledger(LLAMA_70B, [tokens]).effective_bytes == gib * GIB


@pytest.mark.parametrize(("tokens", "percent"), [(1_024, 0.2), (4_096, 1.0), (8_192, 1.9), (32_768, 7.1), (131_072, 23.5)])
def test_llama_70b_takes_its_share_of_memory(tokens: int, percent: float) -> None:
    weights_bytes = round(130.4 * GIB)  # 16-bit weights, as the table that gives these percentages counts them
    assert 100 * memory_share(ledger(LLAMA_70B, [tokens]).effective_bytes, weights_bytes) == pytest.approx(percent, abs=0.06)


@pytest.mark.parametrize(("kv_heads", "gib", "saved_percent"), [(64, 20.0, 0.0), (8, 2.5, 87.5), (1, 0.3125, 98.4)])
def test_fewer_kv_heads_take_less_at_8_192_tokens(kv_heads: int, gib: float, saved_percent: float) -> None:
    account = ledger(_heads(80, kv_heads), [8_192])
    assert account.effective_bytes == gib * GIB
    assert 100 * (1 - account.effective_bytes / (20 * GIB)) == pytest.approx(saved_percent, abs=0.05)


@pytest.mark.parametrize(("query_heads", "kv_heads", "ratio"), [(32, 8, 4), (64, 8, 8), (32, 32, 1), (32, 1, 32), (64, 1, 64)])
def test_grouped_heads_save_by_query_over_kv_heads(query_heads: int, kv_heads: int, ratio: int) -> None:
    assert bytes_ratio(_heads(32, kv_heads), _heads(32, query_heads)) == ratio


@pytest.mark.parametrize(("dtype", "gib"), [("float16", 16), ("float8_e4m3fn", 8), ("int8", 8), ("float32", 32)])
def test_llama_8b_takes_16_gib_for_a_batch_of_16(dtype: str, gib: int) -> None:
    assert ledger(_heads(32, 8, dtype), [8_192] * 16).effective_bytes == gib * GIB


def test_scales_are_paid_in_whole_blocks() -> None:
    scaled = Geometry("gqa", 32, 8, 128, 128, "int8", 16, quant=Quant("symmetric", "head"))
    account = ledger(scaled, [8_192] * 16)
    assert account.effective_bytes == 8 * GIB
    assert account.paged_bytes == 8 * GIB + 16 * 512 * (32 * 2 * 8 * 4)


def test_lengths_1_024_and_3_072_are_padded_by_half() -> None:
    account = ledger(LLAMA_8B, [1_024, 3_072])
    assert (account.effective_bytes, account.paged_bytes, account.padded_bytes) == (512 * MIB, 512 * MIB, 768 * MIB)


def test_lengths_17_31_and_32_waste_16_positions() -> None:
    account = ledger(LLAMA_8B, [17, 31, 32])
    assert (account.paged_positions, account.effective_positions, account.tail_waste_positions) == (96, 80, 16)
    assert account.tail_waste_bytes == 2 * MIB


def test_two_requests_that_share_32_tokens_take_4_blocks() -> None:
    account = ledger(LLAMA_8B, [33, 33], shared_tokens=32)
    assert (account.blocks, account.table_entries, account.paged_bytes) == (4, 6, 8 * MIB)
    assert account.effective_positions == 34
    assert ledger(LLAMA_8B, [33, 33]).paged_bytes == 12 * MIB


def _deepseek_layer(dtype: str = "float16") -> Geometry:
    return Geometry.mla(layers=1, latent_dim=512, rope_dim=64, dtype=dtype, block_tokens=64)


def test_a_latent_layer_takes_1_152_bytes_a_token() -> None:
    without_rope = Geometry("mha", 1, 128, 128, 128, "float16", 64)
    with_rope = Geometry("mha", 1, 128, 128 + 64, 128, "float16", 64)
    assert _deepseek_layer().bytes_per_token == 1_152
    assert without_rope.bytes_per_token == 65_536
    assert with_rope.bytes_per_token == 81_920
    assert bytes_ratio(_deepseek_layer(), without_rope) == pytest.approx(56.9, abs=0.02)


@pytest.mark.parametrize(("tokens", "full_mb", "latent_mb"), [(4_000, 262, 4.6), (128_000, 8_400, 148), (1_024_000, 67_000, 1_180)])
def test_a_latent_layer_saves_98_percent_at_any_length(tokens: int, full_mb: float, latent_mb: float) -> None:
    full = ledger(Geometry("mha", 1, 128, 128, 128, "float16", 64), [tokens]).effective_bytes
    latent = ledger(_deepseek_layer(), [tokens]).effective_bytes
    assert full / 1e6 == pytest.approx(full_mb, rel=0.01)
    assert latent / 1e6 == pytest.approx(latent_mb, rel=0.01)
    assert 1 - latent / full == pytest.approx(0.98, abs=0.005)


def test_a_stage_of_8_layers_holds_a_quarter() -> None:
    shares = split(LLAMA_8B, pipeline_stages=4)
    assert [share.geometry.layers for share in shares] == [8, 8, 8, 8]
    assert {share.geometry.bytes_per_token for share in shares} == {32_768}


def test_four_ranks_hold_two_of_eight_heads_each() -> None:
    shares = split(LLAMA_8B, tensor_parallel=4)
    assert [(share.geometry.kv_heads, share.shard) for share in shares] == [(2, 0), (2, 1), (2, 2), (2, 3)]
    assert {ledger(share.geometry, [8_192]).effective_bytes for share in shares} == {GIB // 4}


def test_more_ranks_than_heads_hold_equal_bytes_twice() -> None:
    shares = split(LLAMA_8B, tensor_parallel=16)
    assert [share.shard for share in shares] == [rank // 2 for rank in range(16)]
    assert {share.geometry.kv_heads for share in shares} == {1}


def test_latent_attention_is_whole_on_every_rank() -> None:
    shares = split(_deepseek_layer(), tensor_parallel=8)
    assert {(share.geometry, share.shard) for share in shares} == {(_deepseek_layer(), 0)}


@pytest.mark.parametrize("ranks", [3, 5, 6, 12])
def test_ranks_that_fit_no_heads_are_refused(ranks: int) -> None:
    with pytest.raises(GeometryError, match="neither divides"):
        split(LLAMA_8B, tensor_parallel=ranks)


@pytest.mark.parametrize(("ranks", "stages"), [(0, 1), (-1, 1), (1, 0), (1, 33), (1, -1)])
def test_splits_that_leave_nothing_are_refused(ranks: int, stages: int) -> None:
    with pytest.raises(GeometryError):
        split(LLAMA_8B, ranks, stages)


@given(st.integers(1, 200), st.integers(1, 200))
def test_stages_share_all_layers_evenly(layers: int, stages: int) -> None:
    if stages <= layers:
        counts = stage_layers(layers, stages)
        assert sum(counts) == layers
        assert max(counts) - min(counts) <= 1


def test_four_tokens_take_20_pairs_without_cache_and_10_with() -> None:
    assert (query_key_pairs(4, cached=False), query_key_pairs(4, cached=True)) == (20, 10)


@given(st.integers(0, 60))
def test_pairs_are_what_counting_gives(tokens: int) -> None:
    steps = range(1, tokens + 1)
    assert query_key_pairs(tokens, cached=True) == sum(steps)
    assert query_key_pairs(tokens, cached=False) == sum(sum(range(1, step + 1)) for step in steps)


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(0, 300), st.integers(1, 40))
def test_accounts_agree_with_counted_blocks(lengths: list[int], shared: int, block_tokens: int) -> None:
    geometry = Geometry("mha", 2, 1, 4, 4, "float32", block_tokens)
    shared = min([shared, *lengths]) if lengths else 0
    account = ledger(geometry, lengths, shared)
    tables = [
        [("shared" if (block + 1) * block_tokens <= shared else owner, block) for block in range(-(-length // block_tokens))]
        for owner, length in enumerate(lengths)
    ]
    physical = {block for table in tables for block in table}
    assert account.table_entries == sum(map(len, tables))
    assert account.blocks == len(physical)
    assert account.paged_bytes == len(physical) * geometry.block_bytes
    assert account.slots_bytes >= account.paged_bytes >= account.effective_bytes
    assert 0 <= account.tail_waste_positions <= len(lengths) * (block_tokens - 1)


@pytest.mark.parametrize(("lengths", "shared"), [([-1], 0), ([10], 11), ([10, 5], 6), ([10], -1), ([], 1), ([True], 0)])
def test_impossible_lengths_are_refused(lengths: list[int], shared: int) -> None:
    with pytest.raises(InvalidArgument):
        ledger(LLAMA_8B, lengths, shared)
