"""How requests end: cancelled, failed, or by a caller's own fault; and the others go on."""

from dataclasses import replace

import pytest
import torch

from kvstore.errors import ResourceExhausted
from kvstore.worker.branch import Branch, Timings
from kvstore.worker.engine import Engine
from kvstore.worker.model import LoadedModel
from kvstore.worker.requests import Ended, Event, Finish, Request
from tests.worker.stores import Watched, prompt, small_store
from tests.worker.test_batching import CHUNKED, Heard, plain, steps, to_the_end


@pytest.mark.parametrize("after", [0, 1, 2, 6, 20])
def test_a_cancelled_request_gives_everything_back(tiny: LoadedModel, store: Watched, after: int) -> None:
    engine = Engine(tiny, store, CHUNKED)
    heard, other = Heard(), Heard()
    job = engine.add(Request(prompt(60), 60, n=3), heard)
    engine.add(Request(prompt(60, seed=1), 25), other)
    steps(engine, after)
    engine.cancel(job)
    engine.cancel(job)
    assert heard.ends() == dict.fromkeys(range(3), Finish.CANCELLED)
    to_the_end(engine)
    assert other.tokens() == plain(tiny, Request(prompt(60, seed=1), 25))
    assert store.held_bytes == 0
    engine.close()


@pytest.mark.parametrize("after", [1, 2, 4, 20])
def test_one_branch_can_end_while_the_others_go_on(tiny: LoadedModel, store: Watched, after: int) -> None:
    engine = Engine(tiny, store, CHUNKED)
    heard = Heard()
    job = engine.add(Request(prompt(60), 30, n=3), heard)
    steps(engine, after)
    engine.cancel(job, 0)
    to_the_end(engine)
    assert heard.ends() == {0: Finish.CANCELLED, 1: Finish.LENGTH, 2: Finish.LENGTH}
    assert heard.tokens(1) == heard.tokens(2) == plain(tiny, Request(prompt(60), 30))
    assert store.held_bytes == 0
    engine.close()


def test_a_listener_that_raises_harms_only_itself(tiny: LoadedModel, store: Watched) -> None:
    def broken(_: Event) -> None:
        raise ValueError("a bug of the caller")

    engine = Engine(tiny, store, CHUNKED)
    other = Heard()
    engine.add(Request(prompt(30), 30, n=3), broken)
    engine.add(Request(prompt(30, seed=1), 9), other)
    to_the_end(engine)
    assert other.tokens() == plain(tiny, Request(prompt(30, seed=1), 9))
    assert store.held_bytes == 0
    engine.close()


def test_a_row_without_numbers_fails_its_own_branch_alone(tiny: LoadedModel, store: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny, store, CHUNKED)
    bad, good = Heard(), Heard()
    engine.add(Request(prompt(30), 5), bad)
    engine.add(Request(prompt(30, seed=1), 5), good)
    forward = engine._forward

    def spoiled(parts: list[tuple[Branch, int]], timings: Timings) -> torch.Tensor:
        known = [branch for branch, count in parts if branch.tokens_to_come == count]
        logits = forward(parts, timings)
        for row, branch in enumerate(known):
            if branch.job.listener is bad:
                logits[row] = float("nan")
        return logits

    monkeypatch.setattr(engine, "_forward", spoiled)
    to_the_end(engine)
    assert bad.ends() == {0: Finish.FAILED}
    assert good.tokens() == plain(tiny, Request(prompt(30, seed=1), 5))
    assert store.held_bytes == 0
    engine.close()


def test_a_sequence_alone_that_gets_no_slots_waits_for_others_and_then_fails(tiny: LoadedModel) -> None:
    store = small_store(tiny, blocks=8)
    taken = store.reserve(8)
    engine = Engine(tiny, store, replace(CHUNKED, patience_s=0.2))
    heard = Heard()
    engine.add(Request(prompt(20), 5), heard)
    to_the_end(engine)
    ended = heard.events[-1]
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, ResourceExhausted)
    again = Heard()
    engine.add(Request(prompt(20), 5), again)
    steps(engine, 3)
    store.abandon(taken)
    to_the_end(engine)
    assert again.tokens() == plain(tiny, Request(prompt(20), 5))
    engine.close()
