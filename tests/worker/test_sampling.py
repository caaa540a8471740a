"""Choosing tokens: what is kept, how often it is drawn, and that a seed decides it alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstore.errors import InternalFault, InvalidArgument
from kvstore.worker.requests import Choice, Sampling
from kvstore.worker.sampling import _HEAD_TOKENS, Sampler, _kept, check, choose_all
from tests.worker.unhurried import unhurried

DRAWS = 4000
WARM = Sampling(temperature=1.0, seed=7)
FILTERS: dict[str, Any] = {"top_k": 3, "top_p": 0.69, "min_p": 0.14}
ROW = torch.tensor([0.5, 2.0, -1.0, 1.0, 0.0, -30.0])
logits_rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40).map(torch.tensor)


def drawn(sampling: Sampling, row: Tensor = ROW, branch: int = 0, draws: int = DRAWS) -> list[int]:
    """Tokens drawn at the first so many positions of a branch."""
    sampler = Sampler(sampling, branch)
    return [sampler.choose(row, range(at)).token for at in range(draws)]


def chi_square(tokens: list[int], shares: Tensor) -> float:
    counts = torch.bincount(torch.tensor(tokens), minlength=len(shares)).double()
    expected = shares.double() * len(tokens)
    seen = expected > 0
    assert counts[~seen].sum() == 0
    return float(((counts - expected)[seen] ** 2 / expected[seen]).sum())


@unhurried
@given(logits_rows)
def test_without_temperature_the_likeliest_is_chosen(row: Tensor) -> None:
    assert row[Sampler(Sampling(), 0).choose(row, []).token] == row.max()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_model_says(temperature: float) -> None:
    shares = (ROW[:5] / temperature).softmax(0)
    tokens = drawn(replace(WARM, temperature=temperature), ROW[:5])
    assert chi_square(tokens, shares) < 18.5  # of 4 degrees of freedom: once in a thousand


def test_branches_of_one_seed_are_independent() -> None:
    pairs = [5 * one + other for one, other in zip(drawn(WARM, ROW[:5]), drawn(WARM, ROW[:5], branch=1), strict=True)]
    shares = torch.outer(ROW[:5].softmax(0), ROW[:5].softmax(0)).flatten()
    assert chi_square(pairs, shares) < 51.2  # of 24 degrees of freedom: once in a thousand


def test_the_filters_act_one_after_the_other() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    kept = {name: set(drawn(replace(WARM, **{name: value}), row)) for name, value in FILTERS.items()}
    assert kept == {"top_k": {0, 1, 2}, "top_p": {0, 1}, "min_p": {0, 1, 2, 3}}
    # Of the three likeliest, whose shares are then 4/9, 3/9 and 2/9, two make up 7/9.
    assert set(drawn(replace(WARM, top_k=3, top_p=0.75), row)) == {0, 1}


@unhurried
@given(logits_rows, st.floats(0, 1), st.integers(0, 50), st.floats(0, 1), st.floats(0.1, 2))
def test_what_is_kept_is_what_the_filters_say(row: Tensor, top_p: float, top_k: int, min_p: float, temperature: float) -> None:
    weights, tokens = _kept(row, Sampling(temperature=temperature, top_p=top_p, top_k=top_k))
    ids = list(range(len(row))) if tokens is None else tokens.tolist()
    every = ((row - row.max()) / temperature).exp().tolist()
    assert weights.tolist() == [every[token] for token in ids]
    ranked = sorted(every, reverse=True)[: top_k or None]
    kept = sorted(weights.tolist(), reverse=True)
    assert kept == ranked[: len(kept)]  # the likeliest
    needed = top_p * math.fsum(ranked)
    assert math.fsum(kept) >= needed * (1 - 1e-12)  # enough
    assert len(kept) == 1 or top_p == 1 or math.fsum(kept[:-1]) < needed * (1 + 1e-12)  # and no more
    assert top_p < 1 or len(kept) == len(ranked)
    likely, _ = _kept(row, Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p))
    assert likely.tolist() == [weight if weight >= torch.tensor(min_p) else 0.0 for weight in weights.tolist()]


@pytest.mark.parametrize("sampling", [replace(WARM, top_p=0.9), replace(WARM, top_k=3 * _HEAD_TOKENS, top_p=0.9), replace(WARM, top_p=0.1)])
def test_a_flat_distribution_keeps_what_its_share_needs(sampling: Sampling) -> None:
    count = 4 * _HEAD_TOKENS
    weights, _ = _kept(torch.zeros(count), sampling)
    assert len(weights) == math.ceil(min(count, sampling.top_k or count) * sampling.top_p - 1e-6)


def test_a_seed_decides_alone() -> None:
    assert drawn(WARM, draws=50) == drawn(WARM, draws=50)
    assert drawn(WARM, draws=50) != drawn(replace(WARM, seed=8), draws=50)
    assert drawn(WARM, draws=50) != drawn(WARM, branch=1, draws=50)
    assert drawn(replace(WARM, seed=-7), draws=50) != drawn(WARM, draws=50)


def test_without_a_seed_requests_differ() -> None:
    free = replace(WARM, seed=None)
    assert drawn(free, draws=60) != drawn(free, draws=60)


def test_batch_mates_change_nothing() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 300)
    kinds = [Sampling(), WARM, replace(WARM, top_p=0.8), Sampling(logprobs=2), Sampling(presence_penalty=2.0), replace(WARM, top_k=5)]
    samplers = [Sampler(sampling, 0) for sampling in kinds]
    made = [[1, 2], [3], [], [4], [int(logits[4].argmax())], []]
    together = choose_all(logits, samplers, made)
    assert together == [sampler.choose(row, tokens) for sampler, row, tokens in zip(samplers, logits, made, strict=True)]
    assert choose_all(logits[:1], samplers[:1], made[:1]) == together[:1]
    assert together[4].token != int(logits[4].argmax())


def test_penalties_count_what_was_made() -> None:
    row = torch.tensor([1.0, 0.9, 0.0])
    assert Sampler(Sampling(presence_penalty=0.5), 0).choose(row, [0]).token == 1
    assert Sampler(Sampling(presence_penalty=0.5), 0).choose(row, [0, 1, 0, 0]).token == 0
    assert Sampler(Sampling(frequency_penalty=0.5), 0).choose(row, [0, 1, 0, 0]).token == 1
    assert Sampler(Sampling(frequency_penalty=0.5), 0).choose(row, [0, 1, 0, 0, 1, 1]).token == 2
    assert Sampler(Sampling(frequency_penalty=-2.0), 0).choose(row, [2]).token == 2
    assert row.tolist() == pytest.approx([1.0, 0.9, 0.0])


def test_logprobs_are_the_model_s_own() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    choice = Sampler(Sampling(temperature=2.0, top_k=1, presence_penalty=2.0, logprobs=2, seed=1), 0).choose(row, [0])
    assert choice.token == 1
    assert choice.logprob == pytest.approx(math.log(0.3))
    assert [token for token, _ in choice.top] == [0, 1]
    assert [logprob for _, logprob in choice.top] == pytest.approx([math.log(0.4), math.log(0.3)])
    alone = Sampler(Sampling(logprobs=0), 0).choose(row, [])
    assert (alone.token, alone.top) == (0, ())
    assert alone.logprob == pytest.approx(math.log(0.4))


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e-4])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    assert set(drawn(replace(WARM, temperature=temperature), draws=20)) == {1}


@pytest.mark.parametrize("sampling", [Sampling(), WARM, replace(WARM, top_p=0.5), Sampling(presence_penalty=1.0)])
def test_logits_that_are_no_numbers_are_a_fault(sampling: Sampling) -> None:
    row = torch.tensor([0.0, math.nan, 1.0])
    with pytest.raises(InternalFault):
        choose_all(row[None], [Sampler(sampling, 0)], [[]])


def test_a_token_of_no_weight_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    row = torch.tensor([-math.inf, 0.0, 1.0, -math.inf])
    sampler = Sampler(WARM, 0)
    for number, token in ((0.0, 1), (1 - 2.0**-53, 2)):
        monkeypatch.setattr(sampler, "_uniform", lambda _, number=number: number)
        assert sampler.choose(row, []).token == token


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("temperature", math.inf), ("top_p", 1.1), ("top_p", -0.1),
        ("min_p", 2.0), ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("top_k", -1), ("logprobs", 21), ("logprobs", -2),
        ("seed", 2**63), ("seed", -(2**63) - 1),
    ],
)  # fmt: skip
def test_a_value_outside_its_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{field} is "):
        check(replace(Sampling(), **{field: value}))


def test_bfloat16_logits_are_taken() -> None:
    assert choose_all(ROW[None].bfloat16(), [Sampler(Sampling(), 0)], [[]]) == [Choice(1)]
