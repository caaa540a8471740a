"""`kvstore plan` and the dispatcher that runs it."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore import __version__
from kvstore.cli.main import COMMANDS, main

LLAMA = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "torch_dtype": "float16"}
NUMBERS = ["plan", "--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "float16"]


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_config_and_its_numbers_give_one_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    from_file = _json(capsys, "plan", str(tmp_path / "config.json"), "--lengths", "1024,3072")
    from_folder = _json(capsys, "plan", str(tmp_path), "--lengths", "1024,3072")
    assert from_file == from_folder == _json(capsys, *NUMBERS, "--lengths", "1024,3072")
    assert from_file["ledger"]["padded_bytes"] == 768 * 2**20


def test_the_ledger_is_printed_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*NUMBERS, "--lengths", "17,31,32", "--dram", "1GiB"]) == 0
    text = capsys.readouterr().out
    for words in ("32 layers, 8 KV heads × 128, float16", "131,072 bytes", "12.0 MiB in 96 positions", "2.0 MiB in 16", "8,192 tokens"):
        assert words in text


def test_every_rank_has_its_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, *NUMBERS, "--tokens", "8192", "--tensor-parallel", "4", "--pipeline-stages", "4")
    assert len(found["ranks"]) == 16
    assert {(rank["layers"], rank["kv_heads"], rank["ledger"]["effective_bytes"]) for rank in found["ranks"]} == {(8, 2, 64 * 2**20)}
    assert main([*NUMBERS, "--tensor-parallel", "2"]) == 0
    assert len(capsys.readouterr().out.split("paged\n")[-1].splitlines()) == 2


def test_latent_attention_is_planned_from_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "plan", "--layers", "1", "--latent-dim", "512", "--rope-dim", "64", "--dtype", "float16")
    assert found["ledger"]["bytes_per_token"] == 1_152


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "no model given"),
        (["plan", "/nowhere/config.json"], "/nowhere/config.json: No such file"),
        ([*NUMBERS[:-1], "half"], "dtype 'half' is unknown"),
        ([*NUMBERS, "--tensor-parallel", "3"], "neither divides"),
        ([*NUMBERS, "--dram", "8G"], "'8G' is no size"),
    ],
)
def test_a_plan_that_fails_says_what_to_do(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("kvstore: ")
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("content", ["", "[]", "{", "7", "[" * 100_000, '{"a":' * 100_000], ids=lambda text: text[:6])
def test_a_file_that_is_no_config_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["-1", "0", "x", "1.5"])
def test_counts_are_whole_and_positive(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*NUMBERS, f"--batch={number}"])
    assert "--batch" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"kvstore {__version__}\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name.replace("_", "-") in text for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_help_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command.replace("_", "-"), "--help"])
    assert "usage: kvstore" in capsys.readouterr().out


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["conquer"])
    assert "conquer" in capsys.readouterr().err
