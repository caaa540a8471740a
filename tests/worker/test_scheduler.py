"""The rules of who is computed, admitted and stopped."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.worker.scheduler import REGAIN_S, SLICE_TOKENS, Room, Rules, gives_way, order, rank, share, slice_blocks


@dataclass(eq=False)
class Fake:
    """See `scheduler.Schedulable`."""

    arrived_at: float
    tokens_to_come: int = 1
    priority: int = 0
    hot_tokens: int = 0
    may_stop: bool = True

    @property
    def tokens_ready(self) -> int:
        return self.tokens_to_come


def test_a_long_hot_prefix_goes_first_but_not_for_ever() -> None:
    rules = Rules(age_s=2.0)
    cold = Fake(0.0)
    for now in (0.5, 1.0, 1.9):
        assert order([cold, Fake(now, hot_tokens=900)], now, rules)[0] is not cold
    assert order([cold, Fake(2.5, hot_tokens=900)], 2.5, rules)[0] is cold


def test_priority_goes_before_prefixes_and_age_counts_as_priority() -> None:
    urgent, hot = Fake(1.0, priority=1), Fake(0.5, hot_tokens=900)
    assert order([hot, urgent], 1.5, Rules(age_s=2.0)) == [urgent, hot]
    assert order([Fake(9.0, priority=1), hot], 9.0, Rules(age_s=2.0))[0] is hot


@given(
    arrivals=st.lists(st.tuples(st.floats(0, 60), st.integers(0, 5000)), min_size=1, max_size=20),
    age_s=st.floats(0.5, 5),
)
def test_nobody_is_overtaken_by_who_came_a_level_of_age_later(arrivals: list[tuple[float, int]], age_s: float) -> None:
    waiting = [Fake(at, hot_tokens=hot) for at, hot in arrivals]
    ranked = order(waiting, 60.0, Rules(age_s=age_s))
    for index, each in enumerate(ranked):
        assert all(later.arrived_at <= each.arrived_at + age_s * 1.001 or later in ranked[index:] for later in waiting)


@given(
    prompts=st.lists(st.integers(2, 3000), max_size=20),
    decoding=st.integers(0, 70),
    step_tokens=st.integers(1, 600),
)
def test_a_step_keeps_to_its_budget_and_everybody_moves(prompts: list[int], decoding: int, step_tokens: int) -> None:
    running = [Fake(float(index), tokens_to_come=tokens) for index, tokens in enumerate([*prompts, *[1] * decoding])]
    parts = share(running, Rules(step_tokens=step_tokens))
    assert [each for each, count in parts if count == 1 and each.tokens_to_come == 1] == running[len(prompts) :]
    assert all(1 <= count <= each.tokens_to_come for each, count in parts)
    assert sum(count for _, count in parts) <= max(step_tokens, decoding + 1)
    if prompts:
        assert running[0] in [each for each, _ in parts]
        assert sum(count for _, count in parts) == min(sum(prompts) + decoding, max(step_tokens, decoding + 1))


def test_without_a_budget_a_prompt_has_its_step_alone() -> None:
    first, second, decoding = Fake(0.0, 50), Fake(1.0, 20), Fake(2.0)
    assert share([decoding, second, first], Rules(step_tokens=None)) == [(first, 50)]
    assert share([decoding], Rules(step_tokens=None)) == [(decoding, 1)]


def test_the_last_in_rank_gives_way_and_nobody_to_itself_alone() -> None:
    rules = Rules(age_s=5.0)
    old, young, urgent = Fake(3.0), Fake(5.0), Fake(7.0, priority=1)
    assert gives_way([old, young, urgent], old, rules) is young
    assert gives_way([old, young, urgent], young, rules) is young
    assert gives_way([old, urgent], old, rules) is old
    assert gives_way([old], old, rules) is None
    assert gives_way([old, Fake(8.0, may_stop=False)], old, rules) is None
    late = Fake(9.0, priority=1)
    assert gives_way([old, late], old, rules) is late, "it came later than its priority is worth"


@given(
    flow=st.lists(st.tuples(st.floats(0, 60), st.integers(-3, 3)), min_size=1, max_size=20),
    priority=st.integers(-3, 3),
    age_s=st.floats(0.5, 5),
)
def test_a_prompt_that_runs_is_held_up_only_by_those_that_came_soon_enough(
    flow: list[tuple[float, int]], priority: int, age_s: float
) -> None:
    rules = Rules(step_tokens=10, age_s=age_s)
    mine = Fake(0.0, 50, priority)
    prompts = [mine, *(Fake(at, 10, urgency) for at, urgency in flow)]
    first, _ = share(prompts, rules)[0]
    assert rank(first, rules) == min(rank(each, rules) for each in prompts)
    if all(at > (urgency - priority) * age_s + 1e-6 for at, urgency in flow):
        assert first is mine


def test_room_shrinks_when_refused_and_comes_back() -> None:
    room = Room(100)
    room.refused(30, 10.0)
    assert room.blocks == 30
    room.look(20, 10.5)
    assert room.blocks == 30
    room.look(40, 10.6)
    assert room.blocks == 40, "what is held may be counted on"
    room.look(40, 10.0 + REGAIN_S)
    assert room.blocks == 45
    for second in range(30):
        room.look(40, 12.0 + REGAIN_S * second)
    assert room.blocks == 100


@pytest.mark.parametrize("held", [0, 1])
def test_room_is_never_nothing(held: int) -> None:
    room = Room(10)
    room.refused(held, 1.0)
    assert room.blocks == 1


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (8, 1), (9, 2), (1000, SLICE_TOKENS // 8)])
def test_a_time_slice_is_no_longer_than_what_is_left_to_make(tokens: int, blocks: int) -> None:
    assert slice_blocks(tokens, 8) == blocks
