"""The worker on a GPU over memory of its own: what it answers is what transformers answers, token for token in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from kvstore.errors import ConfigError, GeometryError, InvalidArgument, Unavailable
from kvstore.kernels.layout import ARENAS
from kvstore.testing.fake_cuda_parts import Violation
from kvstore.worker.engine import Engine
from kvstore.worker.gpu.graphs import MOST_GRAPHS, DecodeGraphs, size_for
from kvstore.worker.gpu.kernels import variants_for
from kvstore.worker.gpu.opening import find_gpu, require_served
from kvstore.worker.pool import PRIVATE_BLOCKS
from kvstore.worker.requests import Finish, Request
from kvstore.worker.scheduler import Rules
from tests.worker.gpu.fake import FakeGpu
from tests.worker.gpu.models import KINDS, load
from tests.worker.kinds import WINDOW, expected
from tests.worker.stores import Watched, prompt

Alone = Callable[..., tuple[Engine, Watched]]
TOKENS = 10  # made by each run: across the end of a block
LONG = 2 * WINDOW + 18  # tokens of a prompt that no window can hold


def graphs(engine: Engine) -> DecodeGraphs:
    """The engine's graphs."""
    return cast(Any, engine)._cache.runner.graphs  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_what_generate_makes_cold_and_warm(gpu: FakeGpu, alone: Alone, kind: str) -> None:
    loaded = load(kind)
    engine, _ = alone(loaded, rules=Rules(step_tokens=24))
    prompts = [prompt(LONG), prompt(20, seed=3), [7]]
    wanted = [expected(loaded, tokens, TOKENS) for tokens in prompts]
    for hits in ([0, 0, 0], [56, 16, 0]):
        done = engine.generate([Request(tokens, TOKENS) for tokens in prompts])
        assert ([each.tokens for each in done], [each.hit_tokens for each in done]) == (wanted, hits)
    assert not graphs(engine).why_off
    assert gpu.captures
    assert gpu.replays > gpu.captures
    assert {name.split("_")[0] for name in gpu.launches} == {"write", "decode"}


def test_samples_and_beams_share_blocks_and_copy_them(alone: Alone) -> None:
    loaded = load("gpu-llama")
    engine, _ = alone(loaded)
    tokens = prompt(21, seed=4)
    samples = engine.generate_all([Request(tokens, TOKENS, n=3)])[0]
    assert [each.tokens for each in samples] == [expected(loaded, tokens, TOKENS)] * 3
    made = cast(Any, loaded.model).generate(
        torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.int64), max_new_tokens=6, do_sample=False, num_beams=3
    )
    beams = engine.generate_all([Request(tokens, 6, beams=3)])[0]
    assert beams[0].tokens == made[0, len(tokens) :].tolist()


def test_those_that_gave_way_come_back_with_the_same_tokens(alone: Alone) -> None:
    loaded = load("gpu-llama")
    engine, _ = alone(loaded, blocks=14)
    prompts = [prompt(30, seed=seed) for seed in range(4)]
    done = engine.generate([Request(tokens, 30) for tokens in prompts])
    assert [each.tokens for each in done] == [expected(loaded, tokens, 30) for tokens in prompts]
    assert sum(each.preemptions for each in done)


def test_a_store_that_goes_away_changes_no_answer(gpu: FakeGpu, alone: Alone) -> None:
    loaded = load("gpu-llama")
    engine, store = alone(loaded)
    tokens = prompt(30, seed=6)
    store.reserve_error, store.reserves_until_error = Unavailable("gone"), 2
    done = engine.generate([Request(tokens, 40)])[0]
    assert (done.tokens, done.finish) == (expected(loaded, tokens, 40), Finish.LENGTH)
    assert "gone" in done.store_fault
    assert gpu.replays, "before it went"


def test_blocks_in_more_places_than_a_table_can_name_are_read_by_torch(gpu: FakeGpu, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("gpu-windows")
    engine, store = alone(loaded)
    pool = cast(Any, engine)._cache.pool
    store.reserve_error = Unavailable("gone")
    take = pool.take_private
    # Each block in memory of its own.
    monkeypatch.setattr("kvstore.worker.pool.PRIVATE_BLOCKS", 1)
    monkeypatch.setattr(pool, "take_private", lambda count: [_apart(pool, take) for _ in range(count)])
    tokens = prompt(8 * ARENAS - 4, seed=8)
    assert engine.generate([Request(tokens, 14)])[0].tokens == expected(loaded, tokens, 14)
    assert any(name.startswith("decode") for name in gpu.launches), "while a table could name them"


def _apart(pool: Any, take: Callable[[int], list[Any]]) -> Any:
    pool._private_blocks = 0
    return take(1)[0]


def test_memory_of_ones_own_grows_by_doubling(alone: Alone) -> None:
    engine, store = alone(load("gpu-llama"), blocks=200)
    pool = cast(Any, engine)._cache.pool
    store.reserve_error = Unavailable("gone")
    places = [place for _ in range(150) for place in pool.take_private(1)]
    assert len({place.arena.address for place in places}) == 5  # 16, 16, 32, 64, and what is left
    assert PRIVATE_BLOCKS == 16
    pool.put_back(places)


# ---- graphs


def test_sizes_are_rounded_up() -> None:
    assert [size_for(rows, 1).rows for rows in (1, 2, 3, 5, 64)] == [1, 2, 4, 8, 64]
    assert [size_for(1, blocks).blocks for blocks in (1, 32, 33, 8192)] == [32, 32, 64, 8192]


def test_one_graph_serves_all_steps_of_its_size(gpu: FakeGpu, alone: Alone) -> None:
    loaded = load("gpu-llama")
    engine, _ = alone(loaded)
    for seed, count in ((0, 3), (10, 4), (20, 3)):
        prompts = [prompt(9 + at, seed=seed + at) for at in range(count)]
        done = engine.generate([Request(tokens, 6) for tokens in prompts])
        assert [each.tokens for each in done] == [expected(loaded, tokens, 6) for tokens in prompts]
    assert gpu.captures == 1
    assert graphs(engine).replayed == gpu.replays == 15


def test_a_pass_that_cannot_be_recorded_is_run_and_said_once(gpu: FakeGpu, alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load("gpu-llama")
    engine, _ = alone(loaded)
    model = cast(Any, loaded.model)
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, out: out if float(out.sum()) else None)  # looks at a number
    try:
        tokens = prompt(12)
        assert engine.generate([Request(tokens, 6)])[0].tokens == expected(loaded, tokens, 6)
    finally:
        hook.remove()
    assert "not permitted" in graphs(engine).why_off
    assert caplog.text.count("not recorded as CUDA graphs") == 1
    assert gpu.replays == 0


def test_few_graphs_are_kept(gpu: FakeGpu, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.worker.gpu.graphs.MOST_GRAPHS", 1)
    loaded = load("gpu-llama")
    engine, _ = alone(loaded)
    for count in (1, 2, 1):
        engine.generate([Request(prompt(9, seed=at), 4) for at in range(count)])
    assert gpu.captures == 3
    assert MOST_GRAPHS > 1


def test_a_replay_over_memory_that_was_given_back_is_noticed(gpu: FakeGpu, alone: Alone) -> None:
    """That the rule is watched at all."""
    loaded = load("gpu-llama")
    engine, _ = alone(loaded)
    engine.generate([Request(prompt(9), 4)])
    recorded = next(iter(cast(Any, graphs(engine))._graphs.values()))
    range_ = gpu.driver._mappings.ranges[-1]
    gpu.driver.free(0, range_.address)
    with pytest.raises(Violation, match="used after they were given back"), torch.inference_mode(), engine.at_work():
        recorded.graph.replay()
    gpu.driver.violations.clear()


# ---- what is not served


@pytest.mark.parametrize(
    ("facts", "error"),
    [
        ({"key_dim": 24, "value_dim": 24}, "no decode kernel"),
        ({"key_dim": 64, "value_dim": 128}, "of one size"),
        ({"dtype": "float64"}, "no decode kernel"),
    ],
)
def test_blocks_that_the_kernels_do_not_read_are_refused(facts: dict[str, Any], error: str) -> None:
    geometry = load("gpu-llama").geometry(8)
    with pytest.raises(GeometryError, match=error):
        variants_for(replace(geometry, **facts), 4)


def test_capped_scores_are_refused_before_the_first_token(gpu: FakeGpu) -> None:
    with pytest.raises(InvalidArgument, match="--device cpu"):
        require_served(load("gemma2"), gpu)
    with pytest.raises(GeometryError, match="--device cpu"):
        require_served(load("deepseek-v3"), gpu)
    require_served(load("gpu-sinks"), gpu)


def test_a_machine_without_a_gpu_says_so_or_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_gpu("cpu") is None
    assert find_gpu("auto") is None
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        find_gpu("cuda")
    with pytest.raises(ConfigError, match="'cuda:x' is no device"):
        find_gpu("cuda:x")
