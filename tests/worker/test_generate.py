"""`kvstore generate` and the worker process, as a user and the demo call them."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli.main import EXIT_FAULT, main
from kvstore.worker.loop import Loop
from kvstore.worker.model import LoadedModel
from kvstore.worker.plain import generate_plain
from tests.worker.stores import Watched, prompt

PROMPT = "The capital of France is"


@pytest.fixture
def no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smol: LoadedModel) -> None:
    """No socket where the daemon's would be, and the model at hand."""
    monkeypatch.setenv("KVSTORE_LISTEN", str(tmp_path / "none.sock"))


@pytest.mark.usefixtures("no_daemon")
def test_json_has_the_text_and_what_it_took(capsys: pytest.CaptureFixture[str], smol: LoadedModel) -> None:
    assert main(["generate", "--standalone", "--prompt", PROMPT, "--max-tokens", "6", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens"] == generate_plain(smol, smol.encode(PROMPT), 6).tokens
    assert facts["text"] == smol.decode(facts["tokens"])
    assert facts["prompt_tokens"] == len(smol.encode(PROMPT))
    assert (facts["store"], facts["hit_tokens"], facts["store_fault"]) == ("standalone", 0, "")
    assert facts["timings"]["ttft_s"] > 0


@pytest.mark.usefixtures("no_daemon")
def test_the_prompt_comes_from_a_file_or_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = []
    (tmp_path / "prompt").write_text(PROMPT)
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    for where in (["--prompt", PROMPT], ["--prompt-file", str(tmp_path / "prompt")], []):
        assert main(["generate", "--standalone", "--max-tokens", "3", *where]) == 0
        said.append(capsys.readouterr().out)
    assert said == [said[0]] * 3


@pytest.mark.usefixtures("no_daemon")
def test_a_stream_is_generated_past_its_window(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--standalone", "--prompt", PROMPT, "--max-tokens", "20", "--window", "8", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "Paris" in facts["text"]
    assert facts["hit_tokens"] == 0


@pytest.mark.usefixtures("no_daemon")
def test_without_a_daemon_it_says_so_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", PROMPT, "--max-tokens", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["store"] == "standalone"
    assert "going on without the store" in err


@pytest.mark.usefixtures("no_daemon")
@pytest.mark.parametrize("words", [["--prompt", ""], ["--prompt", "a", "--max-tokens", "0"], ["--prompt", "a", "--max-tokens", "9000"]])
def test_what_cannot_be_generated_is_told_in_a_line(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["generate", "--standalone", *words]) == EXIT_FAULT
    assert capsys.readouterr().err.startswith("kvstore: ")


def test_a_prompt_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", "--standalone", "--prompt-file", str(tmp_path / "nothing")]) == EXIT_FAULT
    assert "nothing" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--prompt", "caf\udce9"], ["--prompt-file", "prompt"], []])
def test_a_prompt_that_is_no_utf_8_is_told_in_a_line(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompt").write_bytes(b"caf\xe9")
    for errors in ("strict", "surrogateescape"):  # as Python opens standard input, by the locale
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8", errors=errors))
        assert main(["generate", "--standalone", *words]) == EXIT_FAULT
        said = capsys.readouterr().err
        assert said.startswith("kvstore: ")
        assert "UTF-8" in said


def test_a_loop_answers_each_line(tiny: LoadedModel, store: Watched) -> None:
    loop = Loop(tiny, store)
    ask = {"op": "generate", "tokens": prompt(30), "max_tokens": 5, "salt": "x"}
    cold, warm = loop.answer(json.dumps(ask)), loop.answer(json.dumps(ask))
    plain = loop.answer(json.dumps({"op": "plain", "tokens": prompt(30), "max_tokens": 5, "split": 0}))
    split = loop.answer(json.dumps({"op": "plain", "tokens": prompt(30), "max_tokens": 5, "split": 24}))
    assert (cold["tokens"], cold["first_logits"], cold["hit_tokens"]) == (plain["tokens"], plain["first_logits"], 0)
    assert (warm["tokens"], warm["first_logits"], warm["hit_tokens"]) == (split["tokens"], split["first_logits"], 24)
    assert loop.answer('{"op": "reach", "timeout_s": 1}') == {"reached": True}
    loop.close()


@pytest.mark.parametrize("line", ["", "nonsense", "[]", '{"op": "dance"}', '{"op": "plain"}', '{"op": "encode", "text": "a"}'])
def test_a_loop_survives_what_it_cannot_do(tiny: LoadedModel, store: Watched, line: str) -> None:
    loop = Loop(tiny, store)
    assert "error" in loop.answer(line)
    loop.close()


def test_the_command_line_loads_no_torch() -> None:
    code = "import sys; from kvstore.cli.main import main\ntry: main(['--help'])\nfinally: assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
