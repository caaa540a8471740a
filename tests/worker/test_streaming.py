"""Streams: sinks and a window in bounded memory, token for token what a direct implementation with growing lists makes of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor

from kvstore.errors import InvalidArgument, ResourceExhausted
from kvstore.hashing import Identity
from kvstore.worker import attention
from kvstore.worker.attention import Step
from kvstore.worker.model import LoadedModel, prepare
from kvstore.worker.paged import PagedCache
from kvstore.worker.rotation import Rotation
from kvstore.worker.spans import Span
from kvstore.worker.streaming import StreamSequence, StreamShape
from tests.worker.kinds import SMALL, expected, load
from tests.worker.steps import greedy
from tests.worker.stores import Watched, prompt, small_store

SHAPE = StreamShape(sinks=3, window=20, step_tokens=16)  # neither is a multiple of the blocks of 8 tokens
MANY = 4 * SHAPE.window  # tokens made: the whole window is replaced four times
KINDS = ("llama", "llama-yarn", "mha", "mqa", "mistral-full", "qwen2", "qwen3")


def run_together(loaded: LoadedModel, cache: PagedCache, parts: Sequence[tuple[StreamSequence, int]]) -> Tensor:
    """Logits [stream, vocab] after the next so many tokens of each, computed in one step."""
    spans: list[Span] = []
    tokens: list[int] = []
    positions: list[int] = []
    for stream, count in parts:
        stream.ensure(count)
        spans.append(stream.span(count, len(tokens)))
        tokens += stream.tokens[stream.computed : stream.computed + count]
        positions += [0] * count
    step = Step(spans, cache.scratch, cache.native)
    last = torch.tensor([span.at + span.count - 1 for span in spans])
    with torch.inference_mode(), attention.paged(loaded.model):
        out = cast(Any, loaded.model)(
            input_ids=torch.tensor([tokens]), position_ids=torch.tensor([positions]), use_cache=False, logits_to_keep=last, paged_step=step
        )
    for stream, count in parts:
        stream.advance(count)
    return cast(Tensor, out.logits[0])


def streamed(
    loaded: LoadedModel, cache: PagedCache, tokens: Sequence[int], made: int, shape: StreamShape = SHAPE, chunk: int = 16
) -> list[int]:
    """What a stream continues a prompt with."""
    stream = StreamSequence(cache, Rotation(loaded.model), tokens, shape)
    found: list[int] = []
    while len(found) < made:
        logits = run_together(loaded, cache, [(stream, min(chunk, stream.waiting))])
        if not stream.waiting:
            found.append(int(logits[0].argmax()))
            stream.append(found[-1])
    stream.close()
    return found


class Direct:
    """The same, token by token, from a model's own parts and lists that keep everything."""

    def __init__(self, loaded: LoadedModel, shape: StreamShape) -> None:
        self.model, self.shape = cast(Any, loaded.model), shape
        self.kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.model.model.layers]
        self.apply = cast(Any, sys.modules[type(self.model.model.layers[0].self_attn).__module__]).apply_rotary_pos_emb

    def logits(self, token: int) -> Tensor:
        hidden = self.model.model.embed_tokens(torch.tensor([[token]]))
        for layer, kept in zip(self.model.model.layers, self.kept, strict=True):
            hidden = hidden + self.attend(layer.self_attn, layer.input_layernorm(hidden), kept)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return cast(Tensor, self.model.lm_head(self.model.model.norm(hidden))[0, 0])

    def attend(self, module: Any, hidden: Tensor, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
        q, k, v = (each(hidden).view(1, 1, -1, module.head_dim) for each in (module.q_proj, module.k_proj, module.v_proj))
        if hasattr(module, "q_norm"):
            q, k = module.q_norm(q), module.k_norm(k)
        kept.append((k.transpose(1, 2), v.transpose(1, 2)))
        seen = kept if len(kept) <= self.shape.sinks + self.shape.window else kept[: self.shape.sinks] + kept[-self.shape.window :]
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*seen, strict=True))
        cos, sin = self.model.model.rotary_emb(hidden, torch.arange(len(seen))[None])
        _, keys = self.apply(keys, keys, cos, sin)
        query, _ = self.apply(q.transpose(1, 2), keys, cos[:, -1:], sin[:, -1:])
        groups = module.num_key_value_groups
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        weights = (query @ keys.transpose(2, 3) * module.scaling).softmax(dim=-1)
        return cast(Tensor, module.o_proj((weights @ values).transpose(1, 2).reshape(1, 1, -1)))


def direct(loaded: LoadedModel, tokens: Sequence[int], made: int, shape: StreamShape = SHAPE) -> list[int]:
    with torch.inference_mode():
        run = Direct(loaded, shape)
        logits = [run.logits(token) for token in tokens][-1]
        found = [int(logits.argmax())]
        while len(found) < made:
            found.append(int(run.logits(found[-1]).argmax()))
    return found


def cache_of(loaded: LoadedModel, native: bool = False) -> tuple[PagedCache, Watched]:
    store = small_store(loaded)
    return PagedCache(store, native=native), store


@pytest.mark.parametrize(("kind", "native"), [*((kind, False) for kind in KINDS), ("llama", True)])
def test_four_windows_of_tokens_are_those_of_a_direct_implementation(kind: str, native: bool) -> None:
    loaded = load(kind)
    cache, store = cache_of(loaded, native)
    wanted = direct(loaded, prompt(10), MANY)
    assert len(set(wanted)) > 8
    assert streamed(loaded, cache, prompt(10), MANY) == wanted
    assert not store.committed
    cache.close()
    assert store.held_bytes == 0


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a_prompt_of_several_windows_gives_the_same_in_any_chunks(chunk: int) -> None:
    loaded = load("qwen3")
    cache, _ = cache_of(loaded)
    tokens = prompt(70)
    assert streamed(loaded, cache, tokens, 30, chunk=chunk) == direct(loaded, tokens, 30)
    cache.close()


@pytest.mark.parametrize("shape", [StreamShape(8, 16, 8), StreamShape(1, 7, 3), StreamShape(17, 9, 30)], ids=str)
def test_other_shapes_give_the_same(shape: StreamShape) -> None:
    loaded = load("llama")
    cache, _ = cache_of(loaded)
    tokens = prompt(25)
    assert streamed(loaded, cache, tokens, 60, shape, chunk=shape.step_tokens) == direct(loaded, tokens, 60, shape)
    cache.close()


def test_until_the_first_drop_it_is_what_generate_makes() -> None:
    loaded = load("llama")
    cache, _ = cache_of(loaded)
    made = SHAPE.sinks + SHAPE.window - 10
    assert streamed(loaded, cache, prompt(10), made) == expected(loaded, prompt(10), made)
    assert streamed(loaded, cache, prompt(10), 3 * made)[:made] != direct(loaded, prompt(10), 3 * made, StreamShape(1, 5))[:made]
    cache.close()


def test_with_one_layer_it_is_transformers_over_the_kept_tokens() -> None:
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 1, "head_dim": 24})
    model = cast(Any, transformers.AutoModelForCausalLM).from_config(config).to(torch.float32)
    loaded = prepare(model, Identity(model="one layer", dtype="float32"))
    cache, _ = cache_of(loaded)
    tokens = prompt(12)
    found = streamed(loaded, cache, tokens, MANY)
    for token in found:
        kept = tokens if len(tokens) <= SHAPE.sinks + SHAPE.window else tokens[: SHAPE.sinks] + tokens[-SHAPE.window :]
        with torch.inference_mode():
            assert int(model(input_ids=torch.tensor([kept])).logits[0, -1].argmax()) == token
        tokens = [*tokens, token]
    cache.close()


def test_streams_and_other_sequences_share_steps() -> None:
    loaded = load("llama")
    cache, store = cache_of(loaded)
    streams = [StreamSequence(cache, Rotation(loaded.model), tokens, SHAPE) for tokens in (prompt(30), prompt(8, seed=2))]
    made: list[list[int]] = [[], []]
    held = []
    for _ in range(90):
        logits = run_together(loaded, cache, [(stream, min(8, stream.waiting)) for stream in streams])
        for stream, row, some in zip(streams, logits, made, strict=True):
            if not stream.waiting:
                some.append(int(row.argmax()))
                stream.append(some[-1])
        held.append(store.held_bytes)
    for tokens, some in zip((prompt(30), prompt(8, seed=2)), made, strict=True):
        assert some == direct(loaded, tokens, len(some))
    assert max(held) <= held[0]  # all blocks are taken with the first step
    assert greedy(loaded, cache, [prompt(30)], 5) == [expected(loaded, prompt(30), 5)]
    for stream in streams:
        stream.close()
        stream.close()
    cache.close()
    assert store.held_bytes == 0


def test_a_store_with_too_little_room_says_so() -> None:
    loaded = load("llama")
    cache = PagedCache(small_store(loaded, 10))
    stream = StreamSequence(cache, Rotation(loaded.model), [1], StreamShape(4, 100))
    with pytest.raises(ResourceExhausted, match="slots"):
        stream.ensure(1)
    cache.close()


@pytest.mark.parametrize("name", ["mistral", "gemma2", "deepseek-v3", "sinks"])
def test_models_whose_keys_cannot_wait_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="streams need"):
        Rotation(load(name).model)


def test_what_no_stream_can_do_is_refused() -> None:
    loaded = load("llama")
    cache, _ = cache_of(loaded)
    rotation = Rotation(loaded.model)
    with pytest.raises(InvalidArgument, match="at least 1"):
        StreamShape(0, 10)
    with pytest.raises(InvalidArgument, match="no tokens"):
        StreamSequence(cache, rotation, [], SHAPE)
    stream = StreamSequence(cache, rotation, prompt(50), SHAPE)
    for count in (0, 17):
        with pytest.raises(InvalidArgument, match="in one step"):
            stream.ensure(count)
    stream.close()
    cache.close()
