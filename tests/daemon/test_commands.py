"""`kvstore lookup`, `stats` and `clear` as a person runs them, against a daemon."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cli.main import main
from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern, tokens_of


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon")) as process:
        yield process


@pytest.fixture
def files(shared: DaemonProcess, tmp_path: Path) -> list[str]:
    """The arguments that name the daemon and the namespace, with three blocks stored."""
    with KVClient(shared.address) as client:
        client.clear()
        with client.put(client.open_namespace(IDENTITY, GEOMETRY), chain(1, 3)) as put:
            for block in put.blocks:
                block.write(pattern(block.hash))
    (tmp_path / "identity.json").write_text(json.dumps(IDENTITY.fields()))
    (tmp_path / "geometry.json").write_text(json.dumps(GEOMETRY.fields()))
    return ["--address", shared.address, "--identity", str(tmp_path / "identity.json"), "--geometry", str(tmp_path / "geometry.json")]


def stored(files: list[str]) -> int:
    """How many blocks the fixture's namespace has."""
    with KVClient(files[1]) as client:
        return client.lookup(client.open_namespace(IDENTITY, GEOMETRY), chain(1, 3)).blocks


def kvstore(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvstore.cli.main import main; raise SystemExit(main())", *words]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("form", ["json", "spaces", "commas"])
def test_lookup_counts_the_usable_blocks_of_a_prompt(files: list[str], form: str) -> None:
    tokens = tokens_of(1, 4, extra=0)
    text = {"json": json.dumps(tokens), "spaces": " ".join(map(str, tokens)), "commas": ",".join(map(str, tokens))}[form]
    done = kvstore("lookup", *files, "--tokens", "-", given=text)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["blocks"], found["asked_blocks"], found["tokens"]) == (3, 3, 48)
    assert found["tiers"] == {"dram": 3}


def test_lookup_takes_hashes_from_a_file(files: list[str], tmp_path: Path) -> None:
    (tmp_path / "chain").write_text("\n".join(key.hex() for key in each_hash(chain(1, 5))))
    found = json.loads(kvstore("lookup", *files, "--hashes", str(tmp_path / "chain")).stdout)
    assert (found["blocks"], found["asked_blocks"]) == (3, 5)


@pytest.mark.parametrize(
    ("words", "given", "says"),
    [
        (["--tokens", "-"], "hello world", "token ids, not text"),
        (["--hashes", "-"], "abc", "64 hexadecimal digits"),
        (["--hashes", "-"], "abcd", "64 hexadecimal digits"),
        (["--tokens", "/none"], "", "/none"),
    ],
)
def test_lookup_says_what_is_wrong_with_its_input(files: list[str], words: list[str], given: str, says: str) -> None:
    done = kvstore("lookup", *files, *words, given=given)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_lookup_without_a_geometry_says_so(shared: DaemonProcess) -> None:
    done = kvstore("lookup", "--address", shared.address, "--tokens", "-", given="1 2 3")
    assert (done.returncode, "--geometry" in done.stderr) == (2, True)


def test_stats_are_a_table_for_people_and_json_for_programs(files: list[str]) -> None:
    table = kvstore("stats", *files[:2]).stdout
    assert "dram" in table
    assert "committed" in table
    facts = json.loads(kvstore("stats", *files[:2], "--json").stdout)
    dram = next(tier for tier in facts["tiers"] if tier["tier"] == "dram")
    assert dram["blocks"] == 3
    assert dram["class_bytes"]["live"] == 3 * GEOMETRY.slot_bytes
    assert facts["sessions"] == [] or isinstance(facts["sessions"][0]["held_bytes"], int)


def test_stats_show_a_client_s_name_without_obeying_it(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2Jmine\r\nforged  row\u202e\x9b1m é"
    with KVClient(files[1], name=name) as client, client.get(client.open_namespace(IDENTITY, GEOMETRY), chain(1, 3)):
        assert main(["stats", *files[:2]]) == 0
    table = capsys.readouterr().out
    assert "  \\x1b[2Jmine\\r\\nforged  row\\u202e\\x9b1m é\n" in table
    assert all(line.isprintable() for line in table.split("\n"))


def test_clear_asks_before_it_forgets(files: list[str]) -> None:
    done = kvstore("clear", *files)
    assert done.returncode == 1
    assert "--yes" in done.stderr
    assert json.loads(kvstore("lookup", *files, "--tokens", "-", given=json.dumps(tokens_of(1, 3))).stdout)["blocks"] == 3


def test_clear_says_what_it_cleared(files: list[str]) -> None:
    done = kvstore("clear", *files, "--yes")
    assert done.returncode == 0
    assert "cleared 3 blocks: 48.0 KiB in dram" in done.stdout
    assert json.loads(kvstore("lookup", *files, "--tokens", "-", given=json.dumps(tokens_of(1, 3))).stdout)["blocks"] == 0
    assert "cleared 0 blocks" in kvstore("clear", *files[:2], "--yes").stdout


@pytest.mark.parametrize("flags", [["--shard", "tp0/2"], ["--dtype", "float16"], ["--block-tokens", "16"]])
def test_clear_takes_no_part_of_a_namespace_for_all_of_them(files: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear", *files[:2], *flags, "--yes"]) == 2
    assert f"{flags[0]} alone names no namespace" in capsys.readouterr().err
    assert stored(files) == 3


def test_clear_says_that_a_namespace_was_empty(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear", *files, "--shard", "tp0/2", "--yes"]) == 0
    assert "the namespace was empty" in capsys.readouterr().err
    assert stored(files) == 3


class Terminal(io.StringIO):
    """Standard input as a person's terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "status", "left"), [("", 1, 3), ("n\n", 1, 3), ("yes\n", 0, 0)])
def test_clear_forgets_only_after_a_yes(files: list[str], typed: str, status: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    assert main(["clear", *files]) == status
    assert stored(files) == left


@pytest.mark.parametrize(("command", "flag"), [("stats", "--listen"), ("clear", "--address")])
def test_without_a_daemon_a_command_says_so_and_ends(tmp_path: Path, command: str, flag: str) -> None:
    words = [command, flag, str(tmp_path / "none.sock"), *(["--yes"] if command == "clear" else [])]
    done = kvstore(*words)
    assert done.returncode == 2
    assert "kvstore serve" in done.stderr
