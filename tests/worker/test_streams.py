"""Streams in the engine: without an end, among others, token for token what transformers makes over a cache that drops the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvstore.errors import InvalidArgument, KVStoreError, LimitExceeded, Unavailable
from kvstore.worker.engine import Engine, Options
from kvstore.worker.model import LoadedModel
from kvstore.worker.requests import Ended, Event, Finish, Request
from kvstore.worker.scheduler import Rules
from tests.worker.kinds import expected, load
from tests.worker.stores import BLOCK_TOKENS, Watched, prompt, small_store

SINKS, WINDOW = 3, 20  # tokens: neither is a multiple of a block
SHORT = 64  # positions of the model: streams go far past them


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """A random Llama that takes few positions."""
    loaded = load("llama", max_position_embeddings=SHORT)
    assert loaded.max_tokens == SHORT
    return loaded


def reference(loaded: LoadedModel, tokens: Sequence[int], made: int) -> list[int]:
    """What transformers' own attention and cache make of it, token by token: the cache drops the oldest token after the sinks where the
    next would not fit, and turns the keys behind it back by one position."""
    model, cache = cast(Any, loaded.model), DynamicCache(config=loaded.model.config)
    found: list[int] = []
    with torch.inference_mode():
        for token in tokens:
            logits = _next(model, cache, token)
        while True:
            found.append(int(logits.argmax()))
            if len(found) == made:
                return found
            logits = _next(model, cache, found[-1])


def _next(model: Any, cache: DynamicCache, token: int) -> Tensor:
    if cache.get_seq_length() == SINKS + WINDOW:
        for layer in cast(Any, cache).layers:
            kept = [torch.cat((part[:, :, :SINKS], part[:, :, SINKS + 1 :]), dim=2) for part in (layer.keys, layer.values)]
            layer.keys, layer.values = torch.cat((kept[0][:, :, :SINKS], _turned_back(model, kept[0][:, :, SINKS:])), dim=2), kept[1]
    position = torch.tensor([[cache.get_seq_length()]])
    return cast(Tensor, model(input_ids=torch.tensor([[token]]), position_ids=position, cache=cache, use_cache=True).logits[0, -1])


def _turned_back(model: Any, keys: Tensor) -> Tensor:
    """Keys [1, head, token, dim] as they would be one position earlier: cos(-a) = cos(a), sin(-a) = -sin(a)."""
    cos, sin = model.model.rotary_emb(keys, torch.tensor([[1]]))
    half = keys.shape[-1] // 2
    swapped = torch.cat((-keys[..., half:], keys[..., :half]), dim=-1)
    return cast(Tensor, keys * cos - swapped * sin)


def stream(length: int, made: int, seed: int = 0, **more: Any) -> Request:
    return Request(prompt(length, seed=seed), made, window=WINDOW, sinks=SINKS, ignore_eos=True, **more)


@pytest.mark.parametrize(("step_tokens", "native"), [(16, False), (None, False), (500, True)])
def test_streams_among_strangers_are_what_transformers_makes_over_the_same_tokens(
    model: LoadedModel, step_tokens: int | None, native: bool
) -> None:
    store = small_store(model, 200)
    engine = Engine(model, store, Options(Rules(step_tokens=step_tokens), native=native))
    strangers = [Request(prompt(30, seed=5), 20), Request(prompt(41, seed=6), 9)]
    requests = [stream(10, 150), strangers[0], stream(90, 60, seed=2), strangers[1], stream(1, 70, seed=3)]
    done = engine.generate(requests)
    for request, each in zip(requests, done, strict=True):
        wanted = reference if request.window else expected
        assert each.tokens == wanted(model, request.tokens, request.max_tokens)
    assert len(requests[0].tokens) + len(done[0].tokens) > 2 * SHORT, "past the model's positions"
    assert [each.hit_tokens for each in done] == [0] * 5
    assert store.held_bytes == 0
    engine.close()


def test_nothing_of_a_stream_goes_into_the_store_and_its_blocks_are_used_again(model: LoadedModel) -> None:
    store = small_store(model, 40)
    engine = Engine(model, store)
    held: list[float] = []

    def listen(event: Event) -> None:
        held.append(engine.figures()["held_blocks"])

    engine.add(stream(30, 200), listen)
    with engine.at_work():
        while engine.step():
            pass
    assert not store.committed
    assert max(held) == held[1] == (SINKS + BLOCK_TOKENS - 1) // BLOCK_TOKENS + (WINDOW + 126) // BLOCK_TOKENS + 2
    assert engine.generate([stream(30, 4)])[0].hit_tokens == 0
    assert store.held_bytes == 0
    engine.close()


def test_streams_leave_room_for_others_and_wait_for_each_other(model: LoadedModel) -> None:
    store = small_store(model, 56)  # streams may have 42 blocks, and each of these takes 21
    engine = Engine(model, store, Options(Rules(step_tokens=32)))
    order: list[str] = []

    def named(name: str) -> Any:
        return lambda event: order.append(name) if isinstance(event, Ended) and event.finish is Finish.LENGTH else None

    for name, request in {"a": stream(10, 180), "b": stream(10, 180, seed=1), "c": stream(10, 180, seed=2)}.items():
        engine.add(request, named(name))
    other = Request(prompt(30, seed=9), 25)
    engine.add(other, named("other"))
    with engine.at_work():
        while engine.step():
            assert engine.figures()["held_blocks"] <= 56
    assert order[0] == "other", "it passes the stream that waits for another"
    assert sorted(order[1:3]) == ["a", "b"]
    assert order[3] == "c"
    assert store.held_bytes == 0
    engine.close()


def test_a_stream_that_is_stopped_before_it_drops_anything_begins_again(model: LoadedModel) -> None:
    store = small_store(model, 40)
    engine = Engine(model, store, Options(Rules(step_tokens=32)))
    job = engine.add(stream(10, 40), lambda event: None)
    with engine.at_work():
        for _ in range(8):
            engine.step()
        engine._lives.preempt(job.branches[0])
        while engine.step():
            pass
    assert job.branches[0].completion.preemptions == 1
    assert job.branches[0].made == reference(model, prompt(10), 40)
    assert store.held_bytes == 0
    engine.close()


@pytest.mark.parametrize("reserves", [0, 1])
def test_without_the_store_it_goes_on_in_its_own_memory(model: LoadedModel, reserves: int) -> None:
    store = Watched(small_store(model, 60).inner, reserve_error=Unavailable("gone"), reserves_until_error=reserves)
    engine = Engine(model, store)
    assert engine.generate([stream(10, 60)])[0].tokens == reference(model, prompt(10), 60)
    engine.close()


def test_a_cancelled_stream_gives_everything_back(model: LoadedModel) -> None:
    store = small_store(model, 40)
    engine = Engine(model, store)
    job = engine.add(stream(10, 1 << 30), lambda event: None)
    with engine.at_work():
        for _ in range(60):
            assert engine.step()
        engine.cancel(job)
        assert not engine.step()
    assert store.held_bytes == 0
    assert job.branches[0].completion.finish is Finish.CANCELLED
    engine.close()


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"n": 2}, InvalidArgument, "one continuation"),
        ({"beams": 2}, InvalidArgument, "one continuation"),
        ({"sinks": 0}, InvalidArgument, "at least 1"),
        ({"window": -5}, InvalidArgument, "at least 1"),
        ({"window": SHORT}, LimitExceeded, "the model takes 64"),
        ({"window": 50}, LimitExceeded, "smaller window"),
    ],
)
def test_a_stream_that_cannot_be_is_refused(model: LoadedModel, more: dict[str, int], error: type[KVStoreError], says: str) -> None:
    engine = Engine(model, small_store(model, 30))
    facts: dict[str, Any] = {"window": WINDOW, "sinks": SINKS} | more
    with pytest.raises(error, match=says):
        engine.check(Request(prompt(10), 1000, **facts))
    engine.close()


def test_a_model_whose_keys_cannot_wait_has_no_streams() -> None:
    loaded = load("mistral")
    engine = Engine(loaded, small_store(loaded))
    with pytest.raises(InvalidArgument, match="streams need"):
        engine.check(Request(prompt(10), 5, window=16))
    engine.close()
