"""`kvstore bench disagg`: the load it makes, whether it counts right, and both setups with a small model."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from kvstore.bench.disagg.asking import Asked, Heard
from kvstore.bench.disagg.command import Plan, make, serve
from kvstore.bench.disagg.fleet import Machine
from kvstore.bench.disagg.report import compare, figures_of, show
from kvstore.cli.main import main
from kvstore.worker.model import load_model
from kvstore.worker.plain import generate_plain
from tests.worker.little import save_little_llama

PLAN = Plan(
    talks=3, reads=2, talk_tokens=40, read_tokens=200, talk_answer=12, read_answer=2, talk_every_s=0.05, read_every_s=0.1, seed=3
)


def encode(text: str) -> list[int]:
    """A token a character."""
    return [ord(letter) for letter in text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a real tokenizer."""
    return save_little_llama(tmp_path_factory.mktemp("models") / "little", 32, 2, 2, 1, 512)


def test_split_roles_serve_the_load_and_the_texts_are_those_of_one_engine(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    heard = serve("split", PLAN, Machine(folder, 1, "64MiB", 64), lambda text: list(tokenizer.encode(text)))
    found = figures_of(heard)
    assert found["read"]["cached_tokens"] == 2 * (199 // 16 * 16), "the prefill worker's blocks were found by the other"
    assert found["talk"]["cached_tokens"] == 0, "short prompts are computed where they are continued"
    assert (found["talk"]["made_tokens"], found["read"]["made_tokens"]) == (36, 4)
    loaded = load_model(folder)
    for each in heard:
        wanted = generate_plain(loaded, each.asked.tokens, each.asked.answer_tokens).tokens
        assert each.text == tokenizer.decode(wanted, skip_special_tokens=True)


def test_the_load_is_the_same_each_time_and_no_two_prompts_begin_alike() -> None:
    load = make(PLAN, encode)
    assert load == make(PLAN, encode)
    assert [len(each.tokens) for each in load if each.kind == "read"] == [200, 200]
    assert [each.at_s for each in load] == sorted(each.at_s for each in load)
    beginnings = {tuple(each.tokens[:16]) for each in [*load, *make(PLAN, encode, 1_000_000)]}
    assert len(beginnings) == 2 * len(load)


def test_figures_count_from_the_arrival() -> None:
    talk = Heard(Asked("talk", 1.0, [1] * 10, 4), [2.0, 3.0, 5.0], "abc", made_tokens=4, cached_tokens=0)
    read = Heard(Asked("read", 0.0, [1] * 90, 1), [7.0], "a", made_tokens=1, cached_tokens=80)
    found = figures_of([talk, read])
    assert (found["took_s"], found["read"]["ttft_s_p50"], found["talk"]["ttft_s_p50"]) == (7.0, 7.0, 1.0)
    assert (found["talk"]["per_token_s_p50"], found["talk"]["between_s_p99"]) == (1.0, 2.0)
    compared = compare({"split": [talk, read], "both": [Heard(talk.asked, [3.0, 5.0, 9.0], "abd", 4), read]})
    assert compared["both_over_split"]["talk"] == {
        "ttft_s_p50": 2, "ttft_s_p99": 2, "per_token_s_p50": 2, "per_token_s_p99": 2, "between_s_p50": 2, "between_s_p99": 2,
    }  # fmt: skip
    assert compared["same_texts"] == 0.5
    assert "talk: with two workers for both the first token's p99 is 2.00 times" in show(compared)


@pytest.mark.parametrize("words", [["--reads", "0"], ["--talk-every", "0"], ["--model", "/nowhere"]])
def test_a_load_that_cannot_be_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "disagg", *words]) != 0
    assert "kvstore: " in capsys.readouterr().err
