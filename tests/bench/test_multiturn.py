"""`kvstore bench multiturn`, with a small model, over a real daemon."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.bench.multiturn import Plan, measure, questions, show
from kvstore.cli.main import main
from kvstore.hashing import Identity
from kvstore.model_config import position_facts
from kvstore.worker.model import prepare


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """Small models gain nothing from a second thread, and wait long for it where a core is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_later_turns_find_the_earlier_ones_in_memory_and_on_the_disk(tmp_path: Path) -> None:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=211, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=24, max_position_embeddings=512, initializer_range=0.2, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    loaded = prepare(LlamaForCausalLM(config), Identity(model="tiny", position=position_facts(config), dtype="float32"))
    plan = Plan(turns=3, conversations=24, turn_tokens=40, answer_tokens=8)
    asked = np.random.default_rng(1).integers(3, 211, (24, 120)).tolist()
    figures = measure(loaded, plan, asked, tmp_path)
    assert figures["dram_bytes"] < figures["needed_bytes"]
    assert [row["prompt_tokens"] for row in figures["by_turn"]] == [40, 88, 136]
    for turn in figures["turns"]:
        assert turn["hit_tokens"] == max(0, turn["turn"] * 48 - 1) // 16 * 16
        assert turn["hit_tokens"] == 16 * (turn["dram_blocks"] + turn["nvme_blocks"])
    assert sum(turn["nvme_blocks"] for turn in figures["turns"] if turn["turn"] == 2) > 0, "nothing had to come from the disk"
    assert figures["last_turn_ratio"] == figures["by_turn"][2]["plain_s"] / figures["by_turn"][2]["store_s"]
    assert len(show(figures).splitlines()) == 8


def test_every_conversation_has_a_text_of_its_own() -> None:
    found = questions(range(1000), Plan(turns=10, conversations=4, turn_tokens=384, answer_tokens=16))
    assert [len(each) for each in found] == [3840] * 4
    assert [each[0] for each in found] == [0, 250, 500, 750]
    assert found[1][:800] == [*range(250, 1000), *range(50)]


def test_turns_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "multiturn", "--turns", "0"]) != 0
    assert "above 0" in capsys.readouterr().err
