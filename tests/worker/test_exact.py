"""What the worker answers is what transformers answers, to the last bit at the same split points."""

from typing import Any, cast

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvstore.errors import InvalidArgument
from kvstore.hashing import usable_blocks
from kvstore.worker import attention
from kvstore.worker.branch import Completion
from kvstore.worker.engine import Engine
from kvstore.worker.model import LoadedModel
from kvstore.worker.plain import PlainResult, generate_plain
from kvstore.worker.requests import Request
from kvstore.worker.scores import by_sdpa
from kvstore.worker.standalone import StandaloneStore
from tests.worker.stores import BLOCK_TOKENS, Watched, prompt, small_store

TOKENS = 12  # made by each run: past the end of a block of 8


def assert_equal(done: Completion, plain: PlainResult) -> None:
    assert done.error is None
    assert done.first_logits is not None
    assert torch.equal(done.first_logits, plain.first_logits)
    assert done.tokens == plain.tokens


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_lengths_around_whole_blocks_give_the_plain_answer(tiny: LoadedModel, engine: Engine, blocks: int, beside: int) -> None:
    tokens = prompt(blocks * BLOCK_TOKENS + beside, seed=blocks)
    cold = engine.generate([Request(tokens, TOKENS)])[0]
    warm = engine.generate([Request(tokens, TOKENS)])[0]
    assert_equal(cold, generate_plain(tiny, tokens, TOKENS))
    assert cold.hit_tokens == 0
    assert warm.hit_tokens == usable_blocks(len(tokens), BLOCK_TOKENS) * BLOCK_TOKENS
    assert_equal(warm, generate_plain(tiny, tokens, TOKENS, split=warm.hit_tokens))
    assert warm.tokens == cold.tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("kv_heads", "group", "count", "total"), [(1, 4, 2, 9), (2, 2, 40, 41), (3, 3, 17, 300), (3, 3, 128, 1000)])
def test_attention_in_groups_is_transformers_without_its_copies(
    dtype: torch.dtype, kv_heads: int, group: int, count: int, total: int
) -> None:
    generator = torch.Generator().manual_seed(total)
    query = torch.randn((1, count, kv_heads * group, 24), generator=generator).to(dtype).transpose(1, 2)
    keys, values = (torch.randn((kv_heads, total + 5, 24), generator=generator).to(dtype)[:, 5:] for _ in range(2))
    mask = torch.ones(count, total, dtype=torch.bool).tril(total - count)[None, None]
    module = torch.nn.Module()
    module.num_key_value_groups = group  # type: ignore[assignment]  # what transformers reads
    wanted, _ = sdpa_attention_forward(module, query, keys[None], values[None], mask, scaling=0.3)
    assert torch.equal(by_sdpa(module, query, keys, values, mask, 0.3), wanted)


def test_a_prompt_of_one_token_works(tiny: LoadedModel, engine: Engine) -> None:
    for _ in range(2):
        assert_equal(engine.generate([Request([5], TOKENS)])[0], generate_plain(tiny, [5], TOKENS))


def test_the_real_model_cold_is_transformers_bit_for_bit(smol: LoadedModel) -> None:
    tokens = smol.encode("The quick brown fox jumps over the lazy dog, and then it thinks about what it has done. " * 9)
    store = StandaloneStore(smol.identity, smol.geometry(), 64 << 20)
    engine = Engine(smol, store)
    cold = engine.generate([Request(tokens, TOKENS)])[0]
    assert_equal(cold, generate_plain(smol, tokens, TOKENS))
    warm = engine.generate([Request(tokens, TOKENS)])[0]
    assert warm.hit_tokens == usable_blocks(len(tokens), 16) * 16
    assert_equal(warm, generate_plain(smol, tokens, TOKENS, split=warm.hit_tokens))
    engine.close()


def test_the_real_model_agrees_with_generate_of_transformers(smol: LoadedModel) -> None:
    tokens = smol.encode("Once upon a time there was a small machine that")
    made = cast(Any, smol.model).generate(torch.tensor([tokens]), max_new_tokens=TOKENS, do_sample=False)
    assert generate_plain(smol, tokens, TOKENS).tokens == made[0, len(tokens) :].tolist()


def test_a_prefix_shared_with_a_longer_prompt_gives_the_plain_tokens(tiny: LoadedModel, engine: Engine) -> None:
    long, short = prompt(70), [*prompt(41), 9, 8, 7]
    engine.generate([Request(long, TOKENS)])
    warm = engine.generate([Request(short, TOKENS)])[0]
    assert warm.hit_tokens == 40
    assert warm.tokens == generate_plain(tiny, short, TOKENS).tokens


def test_an_answer_continued_as_a_prompt_hits_what_was_decoded(tiny: LoadedModel, engine: Engine) -> None:
    tokens = prompt(20)
    first = engine.generate([Request(tokens, 30)])[0]
    longer = [*tokens, *first.tokens, 4]
    second = engine.generate([Request(longer, TOKENS)])[0]
    assert second.hit_tokens == 48  # of 20 + 30 tokens the last made one was never computed
    assert second.tokens == generate_plain(tiny, longer, TOKENS).tokens


@pytest.mark.parametrize("blocks", [64, 20])
def test_answers_stay_right_while_blocks_are_evicted(tiny: LoadedModel, blocks: int) -> None:
    store = small_store(tiny, blocks)
    engine = Engine(tiny, store)
    for turn in range(12):
        tokens = prompt(50 + turn, seed=turn % 5)
        assert engine.generate([Request(tokens, TOKENS)])[0].tokens == generate_plain(tiny, tokens, TOKENS).tokens
    engine.close()
    assert store.held_bytes == 0


def test_noise_in_unused_memory_changes_nothing(tiny: LoadedModel, store: Watched, engine: Engine) -> None:
    torch.from_numpy(store.arena).view(torch.float32).normal_(0, 3)
    for _ in range(2):
        done = engine.generate([Request(prompt(29), TOKENS)])[0]
        assert_equal(done, generate_plain(tiny, prompt(29), TOKENS, split=done.hit_tokens))


def test_a_batch_gives_each_sequence_what_it_gets_alone(tiny: LoadedModel, engine: Engine) -> None:
    requests = [Request(prompt(length, seed=length), made) for length, made in ((3, 9), (16, 20), (17, 5), (40, 12), (64, 1))]
    engine.generate([requests[3]])  # so that the batch mixes hits and misses
    together = engine.generate(requests)
    assert [done.tokens for done in together] == [generate_plain(tiny, each.tokens, each.max_tokens).tokens for each in requests]
    assert [done.hit_tokens for done in together] == [0, 0, 0, 32, 0]


def test_equal_prompts_in_one_batch_share_and_agree(tiny: LoadedModel, store: Watched, engine: Engine) -> None:
    same = Request(prompt(33), TOKENS)
    plain = generate_plain(tiny, same.tokens, TOKENS)
    assert [done.tokens for done in engine.generate([same] * 4)] == [plain.tokens] * 4
    assert store.blocks == (33 + TOKENS - 1) // BLOCK_TOKENS
    assert store.held_bytes == 0


def test_salts_do_not_share(engine: Engine) -> None:
    for salt in ("a", "b"):
        assert engine.generate([Request(prompt(40), 1, salt)])[0].hit_tokens == 0
    assert engine.generate([Request(prompt(40), 1, "b")])[0].hit_tokens == 32


def test_the_model_is_left_as_it_was_found(tiny: LoadedModel, engine: Engine) -> None:
    before = tiny.model.config._attn_implementation
    engine.generate([Request(prompt(9), 2)])
    assert tiny.model.config._attn_implementation == before


def test_attention_without_a_step_is_refused(tiny: LoadedModel) -> None:
    with attention.paged(tiny.model), pytest.raises(InvalidArgument, match="paged_step"):
        tiny.model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_attention_that_it_cannot_do_is_refused() -> None:
    step = attention.Step([], None)  # type: ignore[arg-type]
    some = torch.zeros(1, 1, 1, 1)
    with pytest.raises(InvalidArgument, match="position_bias"):
        attention.paged_attention(torch.nn.Module(), some, some, some, None, paged_step=step, position_bias=some)
