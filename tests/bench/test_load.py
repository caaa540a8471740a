"""`kvstore bench load`: what it asks, whether waiting is counted right, and the engines in their processes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.bench.load.measure import Places, Result, Work, checked, measure, warm_up
from kvstore.bench.load.prompts import Asked, Load, Passages, Shape, conversations, make, shared_tokens
from kvstore.bench.load.report import figures_of, late_s, percentile, report, show
from kvstore.bench.replay_trace import EXCERPT, Request, Trace, read_trace
from kvstore.errors import InvalidArgument

POSITIONS = 8192


def encode(text: str) -> list[int]:
    """A token a character."""
    return [ord(letter) for letter in text]


def load(scale: int = 32, requests: int = 200, rate: float = 4.0) -> Load:
    return make(read_trace(EXCERPT), Shape(requests, rate, scale, POSITIONS), encode, "a real text that goes on for a while. " * 200)


@pytest.mark.parametrize("scale", [8, 16, 32])
def test_every_prompt_and_its_answer_fit_the_model(scale: int) -> None:
    made = load(scale)
    assert len(made.asked) == 200
    assert all(1 <= len(each.tokens) <= POSITIONS - each.answer_tokens for each in made.asked)
    assert (made.cut > 0) == (scale == 8)


def test_prompts_share_what_the_trace_says_they_share() -> None:
    trace = read_trace(EXCERPT)
    chosen, size = conversations(trace, 200), 512 // 32
    made = load(32)
    seen: set[int] = set()
    expected = 0
    for request, each in zip(chosen, made.asked, strict=True):
        hits = 0
        for number in request.blocks.tolist()[: (len(each.tokens) - 1) // size]:
            if number not in seen:
                break
            hits += 1
        expected += hits * size
        seen.update(request.blocks.tolist()[: len(each.tokens) // size])
    assert made.shared_tokens == expected
    assert made.shared_tokens > made.prompt_tokens / 4


def test_a_block_is_the_same_tokens_every_time_and_no_other_is() -> None:
    passages, again = (Passages(encode, "some text " * 50, 32) for _ in range(2))
    blocks = [tuple(passages.block(number)) for number in range(3000)]
    assert blocks[7] == tuple(again.block(7))
    assert len(set(blocks)) == 3000
    assert {len(block) for block in blocks} == {32}


def test_conversations_are_taken_whole() -> None:
    def turn(at: float, *blocks: int) -> Request:
        return Request(at, 512 * len(blocks), np.array(blocks), 10)

    trace = Trace("made", (turn(0, 0, 1), turn(1, 0, 2), turn(2, 0, 1, 3), turn(3, 0, 4, 5), turn(4, 0, 4, 6), turn(5, 0)), 7)
    assert [request.at_s for request in conversations(trace, 9)] == [0, 2, 3, 4]
    assert [request.at_s for request in conversations(trace, 2)] == [0, 2]


def test_arrivals_come_at_the_rate_that_was_asked_for() -> None:
    arrivals = [each.at_s for each in load(rate=5.0).asked]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    assert 200 / arrivals[-1] == pytest.approx(5.0, rel=0.25)
    assert load(rate=5.0) == load(rate=5.0)


def test_strangers_share_nothing_with_what_is_measured() -> None:
    made = load(32, 40)
    both = warm_up(made.asked) + made.asked
    assert shared_tokens(both, 16) == shared_tokens(warm_up(made.asked), 16) + made.shared_tokens


@pytest.mark.parametrize("shape", [Shape(10, 4.0, 3, 100), Shape(10, 0.0, 16, 100), Shape(0, 4.0, 16, 100)])
def test_a_shape_that_cannot_be_is_refused(shape: Shape) -> None:
    with pytest.raises(InvalidArgument):
        make(read_trace(EXCERPT, 50), shape, encode, "text")
    with pytest.raises(InvalidArgument, match="none of"):
        checked("kvstore,none of these")


def test_late_is_who_was_passed_by_those_that_came_long_after() -> None:
    came_s = [0.0, 1.0, 2.0, 3.0, 4.0]
    assert late_s(came_s, [10, 11, 12, 13, 14], age_s=1.5) == 0
    assert late_s(came_s, [11, 10, 12, 13, 14], age_s=1.5) == 0, "one that came a second later may pass"
    assert late_s(came_s, [14, 10, 11, 12, 13], age_s=1.5) == 3, "it was due with the second that started"


def test_figures_count_from_the_arrival() -> None:
    asked = [Asked(0.0, [1] * 10, 3), Asked(1.0, [1] * 20, 1)]
    answers = [
        {"tokens": [5, 6, 7], "token_at_s": [2.0, 3.0, 4.0], "started_at_s": 0.5},
        {"tokens": [5], "token_at_s": [6.0], "started_at_s": 4.0},
    ]
    found = figures_of(Result("kvstore", {}, answers, {"hit_tokens": 8, "preemptions": 0}), asked)
    assert (found["tokens_per_s"], found["made_tokens_per_s"]) == (34 / 6, 4 / 6)
    assert (found["ttft_s_p50"], found["ttft_s_p99"], found["per_token_s_p99"], found["queued_s_p99"]) == (2.0, 5.0, 1.0, 3.0)
    assert (found["allowed_s_p99"], found["late_s"]) == (4.0, 0.0)
    shown = show(report([Result("kvstore", {}, answers, {"hit_tokens": 8, "preemptions": 0})], asked))
    assert "p99 of kvstore's queueing: 3.00 s; that of what the rule below allows: 4.00 s" in shown
    assert percentile([3, 1, 2], 50) == 2
    assert "no room" in show(report([Result("vllm", reason="no room")], asked))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in bfloat16."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=211, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=512, initializer_range=0.2, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    made: Any = LlamaForCausalLM(config)
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_engines_answer_the_same_requests_in_processes_of_their_own(model: Path, tmp_path: Path) -> None:
    shared = list(range(3, 67))
    asked = [Asked(0.05 * index, [*shared, *range(70 + index, 90 + index)], 6) for index in range(6)]
    work = Work(str(model), 512, 2 * 2 * 2 * 16 * 2, 16 << 20, 64, 1, len(asked), threads=1)
    told: list[str] = []
    results = measure(["kvstore-daemon", "transformers", "vllm"], work, asked, warm_up(asked), Places(tmp_path, tmp_path, told.append))
    assert len(told) == 3
    ours, peer, missing = results
    assert (ours.reason, peer.reason) == ("", "")
    assert "vllm" in missing.reason
    assert ours.figures["hit_tokens"] >= 5 * len(shared)
    assert peer.figures["hit_tokens"] >= 5 * len(shared)
    found = json.loads(json.dumps(report(results, asked)))
    assert {name: "reason" in each for name, each in found["engines"].items()} == {
        "kvstore-daemon": False,
        "transformers": False,
        "vllm": True,
    }
    assert asdict(results[0])["answers"][0]["tokens"]
