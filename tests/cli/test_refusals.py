"""What a command cannot work with is told in one line: settings with which it could only fail later, at its start."""

import io
import os
import subprocess
import sys

import pytest

from kvstore.cli.main import main

WRONG_URLS = ("http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://127.0.0.1:0", "http://[::1", "http://", "http://a b", "ftp://a", "")
WRONG_KEYS = ("clé", "one\ntwo", "nul\x7f", " \n")


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that ends with status 2 and one line."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvstore: ")
    assert len(captured.err.splitlines()) == 1
    return captured.err


@pytest.mark.parametrize("key", WRONG_KEYS)
@pytest.mark.parametrize("words", [["worker", "--standalone", "64MiB", "--http", "nowhere"], ["chat", "--url", "http://127.0.0.1:9"]])
def test_a_key_that_no_header_can_carry(
    words: list[str], key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVSTORE_API_KEY", key)
    assert "KVSTORE_API_KEY" in refused(words, capsys)


@pytest.mark.parametrize("url", [url for url in WRONG_URLS if url])
def test_a_chat_with_no_server_s_address(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no address of a server" in refused(["chat", "--url", url], capsys)


@pytest.mark.parametrize("url", [*WRONG_URLS, "http://a..b:80", "http://é:80", "https://a:80", "http://a:80/base", "http://me:pw@a:80"])
@pytest.mark.parametrize("role", ["prefill", "both"])
def test_a_front_door_before_no_worker_s_address(role: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "http://" in refused(["front", "--http", "127.0.0.1:0", f"--{role}", url], capsys)


def test_a_chat_of_bytes_that_are_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Nobody:
        name = "nobody"

        def close(self) -> None:
            pass

    monkeypatch.setattr("kvstore.cli.chat.over_http", lambda *_: Nobody())
    for errors in ("strict", "surrogateescape"):  # as Python opens standard input, by the locale
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8", errors=errors))
        assert "UTF-8" in refused(["chat", "--url", "http://127.0.0.1:9"], capsys)
    assert "--system" in refused(["chat", "--url", "http://127.0.0.1:9", "--system", "caf\udce9"], capsys)


def test_output_that_nobody_reads_ends_a_command_quietly() -> None:
    words = ["plan", "--layers", "2", "--kv-heads", "1", "--head-dim", "64"]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        program = [sys.executable, "-c", "from kvstore.cli.main import main; raise SystemExit(main())"]
        done = subprocess.run([*program, *words], stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_unknown_flag_is_told_with_the_command_s_own_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lookup", "--tokens", "-", "--tensor", "4"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("usage: kvstore lookup ")
    assert "unrecognized arguments: --tensor 4" in said
