"""`kvstore bench tails` counts what it says: never less than whole blocks, never more than was known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvstore.bench.tails import Measured, conversations, longest_known
from kvstore.cli.main import main


def test_the_benchmark_finds_more_with_tails_and_never_more_than_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tails", "--requests", "60", "--json", str(tmp_path / "tails.json")]) == 0
    figures = json.loads((tmp_path / "tails.json").read_text())
    for row in figures["by_block_tokens"].values():
        assert row["whole_block_tokens"] < row["with_tails_tokens"] <= figures["longest_known_tokens"] < figures["prompt_tokens"]
    assert figures["by_block_tokens"]["16"]["id_bytes_per_block"] == 76
    assert "60 requests" in capsys.readouterr().out


def test_a_load_of_known_prompts_is_counted_by_hand() -> None:
    first, second = np.arange(100, dtype=np.uint32), np.arange(90, dtype=np.uint32)
    second[70:] = 7
    load = [(first, first), (second, second)]
    assert longest_known(load) == 70
    assert Measured(16, False, load).hit_tokens == 64
    assert Measured(16, True, load).hit_tokens == 70
    assert Measured(64, True, load).hit_tokens == 64, "the open end of a sequence is not stored"


def test_the_same_seed_makes_the_same_load() -> None:
    one, other = (list(conversations(20, seed=5)) for _ in range(2))
    assert all((a[1] == b[1]).all() for a, b in zip(one, other, strict=True))
