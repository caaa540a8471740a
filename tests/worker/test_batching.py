"""Continuous batching: whatever happens to a sequence on its way, in fp32 its tokens are those of transformers alone."""


import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.errors import ResourceExhausted
from kvstore.hashing import fingerprint
from kvstore.worker.engine import Engine, Options
from kvstore.worker.model import LoadedModel
from kvstore.worker.plain import generate_plain
from kvstore.worker.requests import Ended, Event, Finish, Listener, Made, Request, Sampling, Started
from kvstore.worker.scheduler import Rules
from tests.worker.stores import BLOCK_TOKENS, Watched, prompt, small_store

CHUNKED = Options(Rules(step_tokens=24), keep_logits=False)


def plain(loaded: LoadedModel, request: Request) -> list[int]:
    """What transformers makes of it, alone and without a store."""
    return generate_plain(loaded, request.tokens, request.max_tokens).tokens


def steps(engine: Engine, count: int) -> None:
    """At most so many steps."""
    with engine.at_work():
        for _ in range(count):
            if not engine.step():
                return


def to_the_end(engine: Engine) -> None:
    """All steps that there are; far too many are a fault."""
    with engine.at_work():
        for _ in range(20_000):
            if not engine.step():
                return
    raise AssertionError("the engine never comes to an end")


class Heard:
    """What a listener was told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def tokens(self, branch: int = 0) -> list[int]:
        """That a branch made."""
        return [event.choice.token for event in self.events if isinstance(event, Made) and event.branch == branch]

    def ends(self) -> dict[int, Finish]:
        """How each branch ended; told once each."""
        found = [(event.branch, event.finish) for event in self.events if isinstance(event, Ended)]
        assert len(found) == len(dict(found))
        return dict(found)


@pytest.mark.parametrize("step_tokens", [1, 7, BLOCK_TOKENS, 24, 1000])
def test_prompts_in_chunks_beside_others_give_the_plain_tokens(tiny: LoadedModel, step_tokens: int) -> None:
    store = small_store(tiny, blocks=64)
    engine = Engine(tiny, store, Options(Rules(step_tokens=step_tokens)))
    requests = [Request(prompt(length, seed=length), 9) for length in (1, 7, 8, 9, 40, 61)]
    assert [done.tokens for done in engine.generate(requests)] == [plain(tiny, request) for request in requests]
    assert store.held_bytes == 0
    engine.close()


def test_a_request_joins_those_that_run_and_decodes_go_on_beside_its_prompt(tiny: LoadedModel, store: Watched) -> None:
    engine = Engine(tiny, store, CHUNKED)
    first, second = Heard(), Heard()
    engine.add(Request(prompt(20), 30), first)
    steps(engine, 5)
    made_before = len(first.tokens())
    engine.add(Request(prompt(100, seed=2), 3), second)
    steps(engine, 3)
    assert not second.tokens(), "100 tokens were computed in three steps of 24"
    assert len(first.tokens()) >= made_before + 2, "a prompt held up a decode"
    to_the_end(engine)
    assert first.tokens() == plain(tiny, Request(prompt(20), 30))
    assert second.tokens() == plain(tiny, Request(prompt(100, seed=2), 3))
    assert isinstance(second.events[0], Started)
    engine.close()


def test_a_prompt_that_another_is_computing_is_not_computed_twice(tiny: LoadedModel, store: Watched) -> None:
    engine = Engine(tiny, store, CHUNKED)
    heard = [Heard() for _ in range(4)]
    for each in heard:
        engine.add(Request(prompt(81), 5), each)
    to_the_end(engine)
    assert [each.tokens() for each in heard] == [plain(tiny, Request(prompt(81), 5))] * 4
    hits = sorted(each.events[0].hit_tokens for each in heard if isinstance(each.events[0], Started))
    assert hits == [0, 80, 80, 80]
    assert sum(len(slots) for slots, _ in store.committed) == 10
    engine.close()


def test_of_many_that_wait_the_hot_one_goes_first(tiny: LoadedModel, store: Watched) -> None:
    engine = Engine(tiny, store, Options(Rules(step_tokens=24, running=1, age_s=1e9)))
    engine.generate([Request(prompt(100, seed=9), 1)])
    begun: list[int] = []

    def listener(index: int) -> Listener:
        return lambda event: begun.append(index) if isinstance(event, Started) else None

    for index in range(8):
        engine.add(Request(prompt(100, seed=9 if index == 6 else index), 2), listener(index))
    to_the_end(engine)
    assert begun[0] == 6, "all came at once, and only one had its blocks in the store"
    assert sorted(begun) == list(range(8))
    engine.close()


@pytest.mark.parametrize("step_tokens", [16, None])
def test_sequences_that_do_not_fit_together_take_turns(tiny: LoadedModel, step_tokens: int | None) -> None:
    store = small_store(tiny, blocks=14)
    engine = Engine(tiny, store, Options(Rules(step_tokens=step_tokens)))
    requests = [Request(prompt(30, seed=seed), 40) for seed in range(5)]
    done = engine.generate(requests)
    assert [each.tokens for each in done] == [plain(tiny, request) for request in requests]
    assert engine.figures()["preemptions_total"] > 0
    assert store.held_bytes == 0
    engine.close()


def test_the_last_in_rank_gives_way(tiny: LoadedModel) -> None:
    store = small_store(tiny, blocks=14)
    engine = Engine(tiny, store, CHUNKED)
    low, high = Heard(), Heard()
    engine.add(Request(prompt(40, seed=1), 40), low)
    steps(engine, 6)
    assert low.tokens()
    engine.add(Request(prompt(40, seed=2), 40, priority=1), high)
    to_the_end(engine)
    assert engine.figures()["preemptions_total"] > 0
    assert (low.ends(), high.ends()) == ({0: Finish.LENGTH}, {0: Finish.LENGTH})
    assert low.tokens() == plain(tiny, Request(prompt(40, seed=1), 40))
    assert high.tokens() == plain(tiny, Request(prompt(40, seed=2), 40))
    engine.close()


@pytest.mark.parametrize(("age_s", "ends"), [(1e-9, True), (1e9, False)])
def test_a_steady_flow_of_higher_priority_holds_a_running_prompt_up_only_while_it_is_young(
    tiny: LoadedModel, store: Watched, age_s: float, ends: bool
) -> None:
    engine = Engine(tiny, store, Options(Rules(step_tokens=8, age_s=age_s), keep_logits=False))
    low, flow = Heard(), Heard()
    request = Request(prompt(60), 1)
    engine.add(request, low)
    steps(engine, 2)
    assert any(isinstance(event, Started) for event in low.events), "it runs before the others come"
    for seed in range(1, 30):  # each takes all that a step has
        engine.add(Request(prompt(8, seed=seed), 1, priority=5), flow)
        steps(engine, 1)
    assert low.tokens() == (plain(tiny, request) if ends else [])
    engine.close()


def test_a_stopped_sequence_goes_on_from_its_blocks(tiny: LoadedModel, store: Watched) -> None:
    engine = Engine(tiny, store, CHUNKED)
    heard = Heard()
    engine.add(Request(prompt(40), 40), heard)
    steps(engine, 30)
    engine._lives.preempt(engine._lives.running[0])
    engine._cache.pool.give_back()
    assert store.held_bytes == 0
    to_the_end(engine)
    assert heard.tokens() == plain(tiny, Request(prompt(40), 40))
    assert engine.figures()["resumed_hit_tokens_total"] >= 40
    engine.close()


def test_samples_share_the_blocks_of_their_prompt(tiny: LoadedModel, store: Watched) -> None:
    engine = Engine(tiny, store, CHUNKED)
    tokens, heard = prompt(100), Heard()
    engine.add(Request(tokens, BLOCK_TOKENS, n=8, sampling=Sampling(temperature=1.0, seed=5)), heard)
    most = 0
    with engine.at_work():
        while engine.step():
            most = max(most, int(engine.figures()["held_blocks"]))
    assert most <= -(-100 // BLOCK_TOKENS) + 8 * 2
    assert len({tuple(heard.tokens(branch)) for branch in range(8)}) == 8
    assert heard.ends() == dict.fromkeys(range(8), Finish.LENGTH)
    assert store.held_bytes == 0
    alone = Engine(tiny, small_store(tiny), CHUNKED)
    other = Heard()
    alone.add(Request(tokens, BLOCK_TOKENS, n=3, sampling=Sampling(temperature=1.0, seed=5)), other)
    to_the_end(alone)
    assert [other.tokens(branch) for branch in range(3)] == [heard.tokens(branch) for branch in range(3)]
    for made in (engine, alone):
        made.close()


def test_greedy_samples_are_all_the_plain_answer(tiny: LoadedModel, store: Watched) -> None:
    engine = Engine(tiny, store, CHUNKED)
    request = Request(prompt(45), 30, n=4)
    done = engine.generate_all([request])[0]
    assert [each.tokens for each in done] == [plain(tiny, request)] * 4
    assert store.held_bytes == 0
    engine.close()


@pytest.mark.parametrize("length", range(64, 71))
def test_a_sample_that_holds_copies_of_anothers_blocks_gives_them_back_before_it_fails(tiny: LoadedModel, length: int) -> None:
    store = small_store(tiny, blocks=13)
    engine = Engine(tiny, store, CHUNKED)
    request = Request(prompt(length), 17, n=2)
    assert [each.tokens for each in engine.generate_all([request])[0]] == [plain(tiny, request)] * 2
    assert store.held_bytes == 0
    engine.close()


@pytest.mark.parametrize("common", [1, 5, 8, 13, 41, 47])
def test_a_prefix_is_found_to_the_token_where_the_store_keeps_tokens(tiny: LoadedModel, common: int) -> None:
    store = small_store(tiny, tails=True)
    engine = Engine(tiny, store, CHUNKED)
    first = prompt(48)
    other = [*first[:common], *prompt(60, seed=5)[common:]]
    engine.generate([Request(first, 1)])
    done = engine.generate([Request(other, 20)])[0]
    shared = next(at for at in range(len(other)) if first[at] != other[at])
    assert done.hit_tokens == shared >= common
    assert done.tokens == generate_plain(tiny, other, 20).tokens
    again = engine.generate([Request([*other, *done.tokens, 7, 8, 9], 5)])[0]
    assert again.hit_tokens == (len(other) + 20 - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert again.tokens == generate_plain(tiny, [*other, *done.tokens, 7, 8, 9], 5).tokens
    assert store.held_bytes == 0
    engine.close()


def test_a_tail_for_which_there_is_no_slot_is_done_without(tiny: LoadedModel) -> None:
    store = small_store(tiny, blocks=8, tails=True)
    engine = Engine(tiny, store, CHUNKED)
    engine.generate([Request(prompt(48), 1)])
    store.reserve_error = ResourceExhausted("nothing more")
    sequence = engine._cache.open([*prompt(20), 3, 4, 5, 6], fingerprint(tiny.identity))
    assert sequence.hit_tokens == 2 * BLOCK_TOKENS
    sequence.close()
    store.reserve_error = None
    engine.close()
    assert store.held_bytes == 0


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[int, Request, int]]:
    """Requests with shared and other prompts: the step at which each comes, itself, the step after which it is cancelled (0: never)."""
    made = []
    for _ in range(draw(st.integers(1, 7))):
        tokens = prompt(draw(st.integers(1, 70)), seed=draw(st.integers(0, 2)))
        request = Request(tokens, draw(st.integers(1, 25)), n=draw(st.integers(1, 3)), priority=draw(st.integers(0, 2)))
        made.append((draw(st.integers(0, 12)), request, draw(st.sampled_from([0, 0, 0, 3, 9]))))
    return made


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(load=loads(), blocks=st.integers(13, 40), step_tokens=st.sampled_from([5, 16, 33, None]), tails=st.booleans())
def test_any_load_gives_each_request_its_own_answer(
    tiny: LoadedModel, load: list[tuple[int, Request, int]], blocks: int, step_tokens: int | None, tails: bool
) -> None:
    """Whatever comes when, in however little memory: tokens are the plain ones, each branch ends once, and nothing stays held."""
    store = small_store(tiny, blocks=blocks, tails=tails)
    engine = Engine(tiny, store, Options(Rules(step_tokens=step_tokens)))
    heard = [Heard() for _ in load]
    jobs: dict[int, object] = {}
    with engine.at_work():
        for step in range(5_000):
            for index, (comes, request, _) in enumerate(load):
                if comes == step:
                    jobs[index] = engine.add(request, heard[index])
            for index, (comes, _, leaves) in enumerate(load):
                if leaves and comes + leaves == step:
                    engine.cancel(jobs[index])  # type: ignore[arg-type]
            if not engine.step() and len(jobs) == len(load):
                break
    for (_, request, leaves), each in zip(load, heard, strict=True):
        expected = plain(tiny, request)
        assert set(each.ends()) == set(range(request.n))
        for branch, finish in each.ends().items():
            got = each.tokens(branch)
            assert got == expected[: len(got)]
            assert finish is Finish.LENGTH or leaves
            assert len(got) == request.max_tokens or finish is Finish.CANCELLED
    assert store.held_bytes == 0
    assert engine.figures()["held_blocks"] == 0
    engine.close()
