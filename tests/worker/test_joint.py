"""Rows of many sequences that torch attends for together: the same answers, whatever lies in memory that nobody has written."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvstore.geometry import Geometry
from kvstore.worker import joint
from kvstore.worker.attention import Step
from kvstore.worker.joint import groups_of
from kvstore.worker.paged import PagedCache
from kvstore.worker.rows import BlockTable, RowLayout
from tests.worker.kinds import expected, load
from tests.worker.steps import greedy
from tests.worker.stores import prompt, small_store

LENGTHS = (3, 8, 9, 15, 22, 30, 41, 70)  # tokens: fewer and more than a window, on and beside the ends of blocks


@pytest.mark.parametrize("kind", ["llama", "mqa", "mistral", "qwen2-windows", "gemma3"])
def test_many_rows_of_different_lengths_get_what_they_get_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(kind)
    store = small_store(loaded, 160)
    torch.from_numpy(store.arena).view(torch.float32).fill_(float("nan"))
    cache = PagedCache(store)
    together: list[int] = []
    real = joint.JointReader.attend

    def attend(self: joint.JointReader, layer: int, query: torch.Tensor, scaling: float) -> torch.Tensor:
        together.append(query.shape[1])
        return real(self, layer, query, scaling)

    monkeypatch.setattr(joint.JointReader, "attend", attend)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    assert greedy(loaded, cache, prompts, 8) == [expected(loaded, tokens, 8) for tokens in prompts]
    assert max(together) >= 4
    assert sum(together) >= 7 * len(LENGTHS)
    cache.close()


@dataclass
class Row:
    """As much of a span as the grouping looks at."""

    start: int
    at: int = 0
    table: BlockTable | None = None


def lengths_of(starts: list[int], window: int | None = None, geometry: Geometry | None = None) -> list[list[int]]:
    layout = RowLayout(geometry or Geometry("gqa", 2, 2, 64, 64, "float32", 16))
    return [[row.start for row in group] for group in groups_of(layout, [Row(start) for start in starts], window)]  # type: ignore[type-var]


def test_rows_that_are_alike_are_one_group() -> None:
    assert lengths_of([40, 50, 30, 500, 45]) == [[30, 40, 45, 50]]
    assert lengths_of([300, 30, 280, 31]) == [[30, 31], [280, 300]]
    assert lengths_of([500, 30, 480, 31], window=20) == [[500, 30, 480, 31]]
    assert lengths_of([30]) == []


def test_long_rows_go_alone() -> None:
    per_token = 2 * 2 * 64 * 4
    long = joint.GROUP_BYTES // per_token
    assert lengths_of([long, long, long]) == []
    assert lengths_of([long // 4] * 6) == [[long // 4] * 3] * 2


def test_a_step_with_tables_in_two_arenas_is_attended_one_by_one() -> None:
    loaded = load("llama")
    cache = PagedCache(small_store(loaded))
    other = PagedCache(small_store(loaded))
    mine, theirs = cache.open(prompt(20), b"\0" * 32), other.open(prompt(20), b"\0" * 32)
    for sequence in (mine, theirs):
        sequence.ensure(20)
        sequence.computed = 19
    spans = [*cache.step([(mine, 1)]).spans, *other.step([(theirs, 1)]).spans]
    assert Step(spans, cache.scratch).groups(None) == []
    assert len(Step([spans[0], spans[0]], cache.scratch).groups(None)) == 1
    for each in (cache, other):
        each.close()
