"""Every kind of attention that the worker serves gives what transformers' own `generate` gives, token for token, in fp32."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import transformers

from kvstore.errors import InvalidArgument
from kvstore.hashing import Identity, usable_blocks
from kvstore.model_config import position_facts
from kvstore.worker import attention
from kvstore.worker.engine import Engine
from kvstore.worker.kinds import reason_of_trial
from kvstore.worker.model import LoadedModel, prepare
from kvstore.worker.paged import PagedCache
from kvstore.worker.plain import generate_plain
from kvstore.worker.requests import Request
from tests.worker.kinds import FAMILIES, KINDS, SMALL, WINDOW, WINDOWED, expected, load
from tests.worker.steps import forward, greedy, start
from tests.worker.stores import BLOCK_TOKENS, prompt, small_store

TOKENS = 14  # made by each run: across the end of a block
LONG = 3 * WINDOW + 8  # tokens of a prompt that no window can hold
# Heads that differ from layer to layer.
_WIDE_AND_NARROW = {"head_dim": 24, "vocab_size_per_layer_input": 211, "hidden_size_per_layer_input": 8}
TOLERANCE = 1e-4  # of logits up to about 10 in fp32: sums in another order are at 2e-5, and nothing else differs


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cache_of(loaded: LoadedModel) -> PagedCache:
    return PagedCache(small_store(loaded, 128))


def test_cold_and_warm_are_what_generate_makes(kind: str) -> None:
    loaded, cache = load(kind), cache_of(load(kind))
    wanted = expected(loaded, prompt(LONG), TOKENS)
    assert greedy(loaded, cache, [prompt(LONG)], TOKENS) == [wanted]
    warm = start(loaded, cache, prompt(LONG))
    assert warm.hit_tokens == usable_blocks(LONG, BLOCK_TOKENS) * BLOCK_TOKENS
    warm.close()
    assert greedy(loaded, cache, [prompt(LONG)], TOKENS) == [wanted]
    cache.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [name for name in KINDS if not name.startswith("deepseek")])
def test_through_the_engine_warm_logits_are_plain_ones_to_the_last_bit(kind: str, dtype: torch.dtype) -> None:
    """Those of a run without a store at the same split."""
    loaded = load(kind, dtype=dtype)
    engine = Engine(loaded, small_store(loaded, 128))
    requests = [Request(prompt(LONG), 4)]
    assert engine.generate(requests)[0].hit_tokens == 0
    warm = engine.generate(requests)[0]
    plain = generate_plain(loaded, prompt(LONG), 4, split=warm.hit_tokens)
    assert warm.hit_tokens == usable_blocks(LONG, BLOCK_TOKENS) * BLOCK_TOKENS
    assert warm.first_logits is not None
    assert torch.equal(warm.first_logits, plain.first_logits)
    assert warm.tokens == plain.tokens
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [name for name in KINDS if name.startswith("deepseek")])
def test_warm_logits_of_latent_attention_are_those_of_the_same_steps_without_the_store(kind: str, dtype: torch.dtype) -> None:
    """Transformers would sum in another order there: the few tokens after a hit attend to latents."""
    loaded = load(kind, dtype=dtype)
    engine = Engine(loaded, small_store(loaded, 128))
    requests = [Request(prompt(LONG), 4)]
    engine.generate(requests)
    warm = engine.generate(requests)[0]
    engine.close()
    cache = cache_of(loaded)
    sequence = start(loaded, cache, prompt(LONG))
    forward(loaded, cache, [(sequence, warm.hit_tokens)])
    assert warm.hit_tokens == usable_blocks(LONG, BLOCK_TOKENS) * BLOCK_TOKENS
    assert warm.first_logits is not None
    assert torch.equal(warm.first_logits, forward(loaded, cache, [(sequence, LONG - warm.hit_tokens)])[0])
    cache.close()


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "deepseek-v3"])
def test_a_tail_within_a_block_and_its_samples_give_the_same(kind: str) -> None:
    loaded = load(kind)
    store = small_store(loaded, 128, tails=True)
    engine = Engine(loaded, store)
    engine.generate([Request(prompt(LONG), 1)])
    shared = LONG - 2 * BLOCK_TOKENS - 3
    other = [*prompt(shared), 4 if prompt(LONG)[shared] != 4 else 5, *prompt(20, seed=8)]
    done = engine.generate_all([Request(other, TOKENS, n=2)])[0]
    assert done[0].hit_tokens == shared > shared // BLOCK_TOKENS * BLOCK_TOKENS
    assert [each.tokens for each in done] == [expected(loaded, other, TOKENS)] * 2
    assert store.held_bytes == 0
    engine.close()


@pytest.mark.parametrize("chunk", [5, 50])
def test_prompts_in_chunks_beside_strangers_give_the_same(kind: str, chunk: int) -> None:
    loaded, cache = load(kind), cache_of(load(kind))
    prompts = [prompt(LONG), prompt(9, seed=3), prompt(33, seed=5)]
    assert greedy(loaded, cache, prompts, TOKENS, chunk) == [expected(loaded, tokens, TOKENS) for tokens in prompts]
    cache.close()


@pytest.mark.parametrize("length", [WINDOW, WINDOW + 1])
@pytest.mark.parametrize("kind", WINDOWED)
def test_lengths_around_a_window_give_the_same(kind: str, length: int) -> None:
    loaded, cache = load(kind), cache_of(load(kind))
    wanted = expected(loaded, prompt(length), TOKENS)
    assert greedy(loaded, cache, [prompt(length)], TOKENS) == [wanted]
    assert greedy(loaded, cache, [prompt(length)], TOKENS, chunk=4) == [wanted]
    cache.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_such_attention_give_what_generate_makes(family: str) -> None:
    loaded, cache = load(family), cache_of(load(family))
    prompts = [prompt(LONG), prompt(9, seed=3)]
    wanted = [expected(loaded, tokens, TOKENS) for tokens in prompts]
    assert len(set(wanted[0])) > 2
    for _ in range(2):
        assert greedy(loaded, cache, prompts, TOKENS, chunk=50) == wanted
    cache.close()


def test_logits_are_those_of_transformers(kind: str) -> None:
    loaded, cache = load(kind), cache_of(load(kind))
    tokens = prompt(LONG)
    with torch.inference_mode():
        wanted = cast(Any, loaded.model)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    sequence = start(loaded, cache, tokens)
    for end in (40, LONG - 1, LONG):
        found = forward(loaded, cache, [(sequence, end - sequence.computed)])[0]
        assert (found - wanted[end - 1]).abs().max() <= TOLERANCE
    cache.close()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, {"attention_mask": attention.Reach(None), "sliding_window": None}) for kind in WINDOWED),
        *((kind, {"attention_mask": attention.Reach(WINDOW - 1), "sliding_window": None}) for kind in ("mistral", "phi3")),
        ("gemma2", {"softcap": None}),
        ("sinks", {"s_aux": None}),
    ],
)
def test_what_a_kind_asks_for_shows_in_its_answer(kind: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, cache = load(kind), cache_of(load(kind))

    def other(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **facts: Any) -> Any:
        return attention.paged_attention(module, query, key, value, **{"attention_mask": attention_mask} | facts | change)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, attention.NAME, other)
    assert greedy(loaded, cache, [prompt(LONG)], TOKENS) != [expected(loaded, prompt(LONG), TOKENS)]
    cache.close()


def test_a_window_gathers_only_the_blocks_that_it_reaches() -> None:
    loaded, cache = load("mistral"), cache_of(load("mistral"))
    sequence = start(loaded, cache, prompt(LONG))
    wanted = expected(loaded, prompt(LONG), 1)
    forward(loaded, cache, [(sequence, LONG - 1)])
    old = (LONG - WINDOW) // BLOCK_TOKENS
    for run in sequence.table.runs:
        for unit in run.units[:old]:
            run.arena.items.view(-1)[unit * run.arena.layout.unit_rows * run.arena.layout.row_items :][:64] = float("nan")
    assert forward(loaded, cache, [(sequence, 1)]).argmax(dim=-1).tolist() == wanted
    cache.close()


def test_windows_and_their_layers_are_in_the_position() -> None:
    windows: list[Any] = [None, 16, 32]
    assert len({position_facts(transformers.MistralConfig(sliding_window=window)) for window in windows}) == 3
    mixed = [["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]]
    gemma = [position_facts(transformers.Gemma3TextConfig(num_hidden_layers=2, layer_types=kinds)) for kinds in mixed]
    assert len(set(gemma)) == 2
    unused = transformers.Qwen2Config(use_sliding_window=False, sliding_window=16)
    assert position_facts(unused) == position_facts(transformers.Qwen2Config())
    scaled = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}
    assert "max_position_embeddings" in position_facts(transformers.Gemma3TextConfig(rope_parameters=scaled))


@pytest.mark.parametrize(
    ("kind", "facts", "named"),
    [
        ("Gemma3TextConfig", {"head_dim": 24, "use_bidirectional_attention": True}, "come later"),
        ("Qwen3NextConfig", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}, "linear_attention"),
        ("Llama4TextConfig", {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 16}, "chunked_attention"),
        ("Gemma3nTextConfig", {"head_dim": 16, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16}, "share K and V"),
        ("DeepseekV32Config", {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "index_head_dim": 16, "index_n_heads": 2}, "indexed_attention"),
        ("BloomConfig", {}, "cannot be replaced"),
        ("Gemma4TextConfig", _WIDE_AND_NARROW, "do not fit blocks"),
        ("StableLmConfig", {}, "without paged_step"),
        ("GPTNeoXConfig", {}, "do not fit blocks"),  # its number of KV heads is not what the configuration says
    ],
)
def test_what_it_cannot_serve_is_refused(kind: str, facts: dict[str, Any], named: str) -> None:
    config = getattr(transformers, kind)(**SMALL | facts)
    model = cast(Any, transformers.AutoModelForCausalLM).from_config(config)
    with pytest.raises(InvalidArgument, match=named):
        prepare(model, Identity(model=kind, dtype="float32"))


def test_a_model_that_passes_by_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("qwen3")
    assert reason_of_trial(loaded.model, loaded.geometry(BLOCK_TOKENS)) == ""
    assert "3 of its 4 layers" in reason_of_trial(loaded.model, loaded.geometry(BLOCK_TOKENS).with_layers(4))
    own = cast(Any, transformers.AttentionInterface._global_mapping["sdpa"])

    def passing_by(module: Any, *given: Any, paged_step: attention.Step, **facts: Any) -> Any:
        paged_step.layers.add(module.layer_idx)
        return own(module, *given[:3], None, **facts)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, attention.NAME, passing_by)
    assert "not those of its own attention" in reason_of_trial(loaded.model, loaded.geometry(BLOCK_TOKENS))
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, attention.NAME, own)
    assert "fails" in reason_of_trial(loaded.model, loaded.geometry(BLOCK_TOKENS))


def test_a_mask_of_the_model_s_own_is_refused() -> None:
    loaded, cache = load("llama"), cache_of(load("llama"))
    step = cache.step([])
    some = torch.zeros(1, 1, 1, 1)
    for mask, facts, named in ((some, {}, "mask of its own"), (attention.Reach(5), {"sliding_window": 4}, "asks for a window of 4")):
        with pytest.raises(InvalidArgument, match=named):
            attention.paged_attention(loaded.model, some, some, some, mask, paged_step=step, **cast(Any, facts))
    with pytest.raises(InvalidArgument, match="more than causal"):
        attention.reach(use_vmap=True)
    cache.close()
