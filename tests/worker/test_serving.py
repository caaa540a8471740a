"""An engine in a thread of its own: requests from any thread, cancellation, a step that breaks, the end."""

import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvstore.errors import InvalidArgument, KVStoreError, LimitExceeded, ResourceExhausted, SessionEnded
from kvstore.worker.engine import Engine, Options
from kvstore.worker.model import LoadedModel
from kvstore.worker.plain import generate_plain
from kvstore.worker.requests import Ended, Event, Finish, Made, Request, Sampling
from kvstore.worker.scheduler import Rules
from kvstore.worker.serving import EngineThread
from tests.worker.stores import Watched, prompt, small_store

WAIT_S = 60.0  # seconds: far beyond what anything here takes


class Waiting:
    """A listener to wait on."""

    def __init__(self, branches: int = 1) -> None:
        self.tokens: dict[int, list[int]] = {branch: [] for branch in range(branches)}
        self.ended: dict[int, Ended] = {}
        self.first, self.over = threading.Event(), threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Made):
            self.tokens[event.branch].append(event.choice.token)
            self.first.set()
        if isinstance(event, Ended):
            self.ended[event.branch] = event
            if len(self.ended) == len(self.tokens):
                self.over.set()

    def end(self) -> Ended:
        """How branch 0 ended."""
        assert self.over.wait(WAIT_S)
        return self.ended[0]


REQUESTS = [Request(prompt(20 + seed, seed=seed), 20) for seed in range(6)]


@pytest.fixture(scope="module")
def plain(tiny: LoadedModel) -> list[list[int]]:
    """What transformers alone makes of REQUESTS: before any engine has the model, which attends through its cache from then on."""
    return [generate_plain(tiny, request.tokens, request.max_tokens).tokens for request in REQUESTS]


@pytest.fixture
def serving(tiny: LoadedModel, store: Watched, plain: list[list[int]]) -> Iterator[EngineThread]:
    made = EngineThread(Engine(tiny, store, Options(Rules(step_tokens=32), keep_logits=False)), max_waiting=3)
    yield made
    made.close()
    assert store.held_bytes == 0


def test_requests_from_many_threads_get_their_own_answers(serving: EngineThread, plain: list[list[int]]) -> None:
    waiting = [Waiting() for _ in REQUESTS]

    def ask(index: int) -> None:
        while True:
            try:
                serving.submit(REQUESTS[index], waiting[index])
            except ResourceExhausted:
                continue
            return

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(REQUESTS))]
    for thread in threads:
        thread.start()
    for tokens, each in zip(plain, waiting, strict=True):
        assert each.end().finish is Finish.LENGTH
        assert each.tokens[0] == tokens
    for thread in threads:
        thread.join()


def test_a_request_can_be_cancelled_from_outside(serving: EngineThread) -> None:
    waiting = Waiting()
    ticket = serving.submit(Request(prompt(30), 480), waiting)
    assert waiting.first.wait(WAIT_S)
    ticket.cancel()
    assert waiting.end().finish is Finish.CANCELLED
    ticket.cancel()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request([], 4), InvalidArgument),
        (Request(prompt(510), 30), LimitExceeded),
        (Request(prompt(9), 3, n=65), InvalidArgument),
        (Request(prompt(9), 3, sampling=Sampling(temperature=-1.0)), InvalidArgument),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(serving: EngineThread, request_: Request, error: type[KVStoreError]) -> None:
    with pytest.raises(error):
        serving.submit(request_, Waiting())


def test_more_than_may_wait_are_told_to_come_again(serving: EngineThread) -> None:
    held, go_on = threading.Event(), threading.Event()

    def hold(_: Engine) -> None:
        held.set()
        go_on.wait(WAIT_S)

    serving.ask(hold)
    assert held.wait(WAIT_S)
    waiting = [Waiting() for _ in range(3)]
    for each in waiting:
        serving.submit(Request(prompt(9), 2), each)
    with pytest.raises(ResourceExhausted, match="come again"):
        serving.submit(Request(prompt(9), 2), Waiting())
    go_on.set()
    assert [each.end().finish for each in waiting] == [Finish.LENGTH] * 3


def broken(*_: object) -> None:
    """In place of a step's forward pass."""
    raise RuntimeError("out of memory")


def test_a_step_that_breaks_fails_what_ran_and_no_more(
    serving: EngineThread, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(serving._engine, "_forward", broken)
        lost = Waiting()
        serving.submit(Request(prompt(9), 2), lost)
        ended = lost.end()
    assert ended.finish is Finish.FAILED
    assert "out of memory" in str(ended.error)
    after = Waiting()
    serving.submit(REQUESTS[0], after)
    assert after.end().finish is Finish.LENGTH
    assert after.tokens[0] == plain[0]


def test_its_end_ends_every_request(tiny: LoadedModel, store: Watched) -> None:
    serving = EngineThread(Engine(tiny, store))
    waiting = [Waiting() for _ in range(3)]
    for each in waiting:
        serving.submit(Request(prompt(30), 480), each)
    assert waiting[0].first.wait(WAIT_S)
    serving.close()
    assert [each.end().finish for each in waiting] == [Finish.CANCELLED] * 3
    with pytest.raises(SessionEnded):
        serving.submit(Request(prompt(9), 2), Waiting())
    serving.close()
    assert store.held_bytes == 0


def test_steps_that_fail_in_a_row_show_until_one_works(tiny: LoadedModel, store: Watched) -> None:
    with closing(EngineThread(Engine(tiny, store))) as serving:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serving._engine, "_forward", broken)
            for healthy in (True, True, False):
                lost = Waiting()
                serving.submit(Request(prompt(9), 2), lost)
                assert lost.end().finish is Finish.FAILED
                assert (serving.health() == "") is healthy
        assert "the last 3 steps failed" in serving.health()
        assert "out of memory" in serving.health()
        after = Waiting()
        serving.submit(REQUESTS[0], after)
        assert after.end().finish is Finish.LENGTH
        assert serving.health() == ""


def test_a_thread_that_ends_by_itself_tells_everybody_and_says_why(
    tiny: LoadedModel, store: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = EngineThread(Engine(tiny, store))
    assert serving.health() == ""
    monkeypatch.setattr(serving._engine, "step", lambda: sys.exit("nothing goes any more"))
    lost = Waiting()
    serving.submit(Request(prompt(9), 2), lost)
    assert lost.end().finish is Finish.CANCELLED
    serving._thread.join(WAIT_S)
    assert serving.health() == "the engine has ended: SystemExit: nothing goes any more"
    assert serving.figures()["healthy"] == 0
    with pytest.raises(SessionEnded):
        serving.submit(Request(prompt(9), 2), Waiting())
    assert store.held_bytes == 0


def test_two_engines_on_one_model_end_in_any_order(tiny: LoadedModel, plain: list[list[int]]) -> None:
    first, second = (EngineThread(Engine(tiny, small_store(tiny))) for _ in range(2))
    for serving in (first, second):
        waiting = Waiting()
        serving.submit(REQUESTS[0], waiting)
        assert waiting.end().finish is Finish.LENGTH
    first.close()
    after = Waiting()
    second.submit(REQUESTS[1], after)
    assert after.end().finish is Finish.LENGTH
    assert after.tokens[0] == plain[1]
    second.close()
    assert generate_plain(tiny, REQUESTS[0].tokens, REQUESTS[0].max_tokens).tokens == plain[0]
