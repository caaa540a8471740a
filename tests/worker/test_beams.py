"""Beam search over forked sequences: the texts are those of transformers' `generate`, and the beams share their blocks."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from kvstore.errors import InvalidArgument, ResourceExhausted
from kvstore.worker.engine import Engine, Options
from kvstore.worker.model import LoadedModel
from kvstore.worker.requests import Finish, Request, Sampling
from kvstore.worker.scheduler import Rules
from tests.worker.stores import BLOCK_TOKENS, Watched, prompt, small_store
from tests.worker.test_batching import CHUNKED, Heard, steps, to_the_end


def searched(loaded: LoadedModel, tokens: list[int], max_tokens: int, beams: int, best: int) -> list[list[int]]:
    """What transformers finds."""
    eos = sorted(loaded.eos) or None
    found = cast(Any, loaded.model).generate(
        torch.tensor([tokens]), max_new_tokens=max_tokens, num_beams=beams, num_return_sequences=best, do_sample=False,
        eos_token_id=eos, pad_token_id=0,
    )  # fmt: skip
    texts = [row[len(tokens) :] for row in found.tolist()]
    ends = [next((at + 1 for at, token in enumerate(text) if token in loaded.eos), len(text)) for text in texts]
    return [text[:end] for text, end in zip(texts, ends, strict=True)]


@pytest.fixture(scope="module")
def ending(tiny: LoadedModel) -> LoadedModel:
    """The tiny model where a fifth of its tokens end a text."""
    return replace(tiny, eos=frozenset(range(3, 211, 25)))


@pytest.mark.parametrize(("beams", "best"), [(1, 1), (2, 1), (3, 3), (5, 2)])
@pytest.mark.parametrize("length", [5, BLOCK_TOKENS, 43])
def test_the_texts_are_those_of_transformers(tiny: LoadedModel, ending: LoadedModel, beams: int, best: int, length: int) -> None:
    for loaded in (tiny, ending):
        store = small_store(loaded)
        engine = Engine(loaded, store, CHUNKED)
        done = engine.generate_all([Request(prompt(length), 20, n=best, beams=beams)])[0]
        assert [each.tokens for each in done] == searched(loaded, prompt(length), 20, beams, best)
        assert store.held_bytes == 0
        engine.close()


def test_beams_share_what_they_have_in_common(tiny: LoadedModel, store: Watched) -> None:
    engine = Engine(tiny, store, CHUNKED)
    engine.add(Request(prompt(100), 2 * BLOCK_TOKENS, beams=6), Heard())
    most = 0
    with engine.at_work():
        while engine.step():
            most = max(most, int(engine.figures()["held_blocks"]))
    assert most <= -(-100 // BLOCK_TOKENS) + 6 * 3
    assert store.held_bytes == 0
    engine.close()


def test_a_search_goes_on_beside_others_and_after_it_was_stopped(tiny: LoadedModel) -> None:
    store = small_store(tiny, blocks=26)
    engine = Engine(tiny, store, Options(Rules(step_tokens=24)))
    heard, other = Heard(), Heard()
    engine.add(Request(prompt(40, seed=1), 60), other)
    steps(engine, 3)
    engine.add(Request(prompt(30), 24, n=2, beams=4), heard)
    to_the_end(engine)
    assert [heard.tokens(branch) for branch in range(2)] == searched(tiny, prompt(30), 24, 4, 2)
    assert heard.ends() == {0: Finish.LENGTH, 1: Finish.LENGTH}
    assert len(other.tokens()) == 60
    assert engine.figures()["preemptions_total"] > 0
    assert store.held_bytes == 0
    engine.close()


@pytest.mark.parametrize("step_tokens", [3, 5, 8, 13, None])
@pytest.mark.parametrize("after", [4, 7, 11, 14])
def test_a_search_that_was_stopped_goes_on_however_its_beams_are_divided_into_steps(
    tiny: LoadedModel, step_tokens: int | None, after: int
) -> None:
    store = small_store(tiny)
    engine = Engine(tiny, store, Options(Rules(step_tokens=step_tokens)))
    heard, other = Heard(), Heard()
    engine.add(Request(prompt(30), 24, n=2, beams=4), heard)
    with engine.at_work():
        while len(engine._lives.running) < 4 or len(engine._lives.running[0].made) < after:
            engine.step()
    engine._lives.preempt(engine._lives.running[0])
    engine.add(Request(prompt(40, seed=1), 30), other)
    to_the_end(engine)
    assert [heard.tokens(branch) for branch in range(2)] == searched(tiny, prompt(30), 24, 4, 2)
    assert len(other.tokens()) == 30
    assert store.held_bytes == 0
    engine.close()


def test_beams_for_which_there_is_no_memory_fail_with_what_to_do(tiny: LoadedModel) -> None:
    store = small_store(tiny, blocks=9)
    engine = Engine(tiny, store, CHUNKED)
    done = engine.generate([Request(prompt(40), 40, beams=8)])[0]
    assert isinstance(done.error, ResourceExhausted)
    assert store.held_bytes == 0
    engine.close()


@pytest.mark.parametrize("after", [1, 3, 10])
def test_a_cancelled_search_gives_everything_back(tiny: LoadedModel, store: Watched, after: int) -> None:
    engine = Engine(tiny, store, CHUNKED)
    heard = Heard()
    job = engine.add(Request(prompt(50), 40, n=2, beams=4), heard)
    steps(engine, after)
    engine.cancel(job, 1)
    to_the_end(engine)
    assert heard.ends() == {0: Finish.CANCELLED, 1: Finish.CANCELLED}
    assert store.held_bytes == 0
    engine.close()


@pytest.mark.parametrize(
    "request_", [Request([1], 3, n=3, beams=2), Request([1], 3, beams=65), Request([1], 3, beams=2, sampling=Sampling(temperature=1.0))]
)
def test_a_search_that_makes_no_sense_is_refused(engine: Engine, request_: Request) -> None:
    with pytest.raises(InvalidArgument, match="beam"):
        engine.generate([request_])
