"""Requests, their limits, and how they end."""

from dataclasses import replace

import pytest

from kvstore.errors import GeometryError, InvalidArgument, LimitExceeded
from kvstore.worker.engine import MAX_BATCH_SEQUENCES, Engine
from kvstore.worker.model import LoadedModel
from kvstore.worker.plain import generate_plain
from kvstore.worker.requests import Finish, Request
from kvstore.worker.standalone import StandaloneStore
from tests.worker.stores import Watched, prompt, small_store


def test_a_text_ends_where_the_model_ends_it(tiny: LoadedModel) -> None:
    free = generate_plain(tiny, prompt(20), 30).tokens
    ending = replace(tiny, eos=frozenset({free[11]}))
    engine = Engine(ending, small_store(ending))
    done = engine.generate([Request(prompt(20), 30)])[0]
    assert done.finish is Finish.EOS
    assert done.tokens == free[: free.index(free[11]) + 1] == generate_plain(ending, prompt(20), 30).tokens
    engine.close()


def test_a_text_ends_at_its_limit(engine: Engine) -> None:
    done = engine.generate([Request(prompt(20), 7)])[0]
    assert (len(done.tokens), done.finish) == (7, Finish.LENGTH)


def test_no_requests_give_no_completions(engine: Engine) -> None:
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request([], 4), InvalidArgument),
        (Request([1], 0), InvalidArgument),
        (Request([1, 211], 1), InvalidArgument),
        (Request([-1], 1), InvalidArgument),
        (Request(prompt(510), 3), LimitExceeded),
    ],
    ids=["empty", "nothing to make", "unknown id", "negative id", "too long"],
)
def test_a_request_that_no_model_could_serve_is_refused(store: Watched, engine: Engine, request_: Request, error: type[Exception]) -> None:
    with pytest.raises(error):
        engine.generate([Request(prompt(9), 2), request_])
    assert store.acquired == []


def test_a_batch_past_its_limit_is_refused(engine: Engine) -> None:
    with pytest.raises(LimitExceeded):
        engine.generate([Request([1], 1)] * (MAX_BATCH_SEQUENCES + 1))


def test_the_longest_sequence_the_model_takes_is_served(tiny: LoadedModel, engine: Engine) -> None:
    assert engine.generate([Request(prompt(505), 7)])[0].tokens == generate_plain(tiny, prompt(505), 7).tokens


def test_the_timings_add_up_to_the_first_token(engine: Engine) -> None:
    timings = engine.generate([Request(prompt(60), 3)])[0].timings
    parts = {name: value for name, value in vars(timings).items() if name not in ("ttft_s", "decode_s")}
    assert 0 < sum(parts.values()) <= timings.ttft_s
    assert timings.decode_s > 0


def test_a_step_that_breaks_gives_back_what_it_held(store: Watched, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "_forward", broken)
    with pytest.raises(RuntimeError):
        engine.generate([Request(prompt(30), 3)])
    assert store.held_bytes == 0
    assert store.blocks == 0


def test_a_store_with_another_models_blocks_is_refused(tiny: LoadedModel) -> None:
    other = replace(tiny.geometry(8), layers=4)
    with pytest.raises(GeometryError):
        Engine(tiny, StandaloneStore(tiny.identity, other, 1 << 20))
