"""What a log line looks like, whatever is in it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import errors
from kvstore.clients.client import KVClient
from kvstore.daemon.log_output import AT_ONCE_BYTES, KEPT_BYTES, LogOutput
from kvstore.daemon.logs import JsonLines, TextLines

FORGED = "me\n2026-01-01T00:00:00.000Z ERROR   all is lost\r\x1b[2J\u2028\u202e"


def record(text: str, **extra: object) -> logging.LogRecord:
    return logging.getLogger("test").makeRecord("test", logging.INFO, "here", 1, text, (), None, extra=extra)


@pytest.mark.parametrize("where", ["text", "key"])
def test_a_client_cannot_write_lines_of_its_own(where: str) -> None:
    made = record(FORGED) if where == "text" else record("session 1 attached", client=FORGED)
    line = TextLines().format(made)
    assert line.isprintable()
    assert "me\\n2026" in line
    words = json.loads(JsonLines().format(made))
    assert FORGED in (words["text"], words.get("client"))


def test_what_is_printable_stays_as_it_is() -> None:
    assert TextLines().format(record("größer als 4 KiB", client="日本")).endswith("INFO    größer als 4 KiB client=日本")


@pytest.fixture
def pipe() -> Iterator[tuple[int, LogOutput]]:
    """What is read, and what writes there."""
    read, write = os.pipe()
    yield read, LogOutput(write)
    os.close(read)
    os.close(write)


def all_of(read: int) -> bytes:
    os.set_blocking(read, False)
    got = b""
    while True:
        try:
            got += os.read(read, 1 << 20)
        except BlockingIOError:
            return got


def test_lines_that_nobody_takes_hold_nobody_up_and_come_later_in_order(pipe: tuple[int, LogOutput]) -> None:
    read, output = pipe
    lines = [f"{number} " + "x" * (number * 997 % (3 * AT_ONCE_BYTES)) for number in range(60)]
    for line in lines:
        output.emit(record(line))
    got = b""
    while piece := all_of(read):
        got += piece
        output.flush()
    assert got.decode().splitlines() == lines


def test_what_is_kept_is_bounded_and_what_is_dropped_is_counted(pipe: tuple[int, LogOutput]) -> None:
    read, output = pipe
    line = "x" * 100_000
    for _ in range(2 * KEPT_BYTES // len(line)):
        output.emit(record(line))
    dropped = output.dropped
    assert dropped >= KEPT_BYTES // len(line) - 2
    got = b""
    while piece := all_of(read):
        got += piece
        output.flush()
    assert got.splitlines().count(line.encode()) == 2 * KEPT_BYTES // len(line) - dropped
    assert got.endswith(f"... {dropped} log lines were dropped: nobody took them from standard error\n".encode())
    output.emit(record("and on"))
    assert all_of(read) == b"and on\n"


def test_a_reader_that_has_gone_and_a_line_without_words_hold_nobody_up() -> None:
    read, write = os.pipe()
    output = LogOutput(write)
    wrong = record("%d blocks")
    wrong.args = ("many",)
    output.emit(wrong)
    assert b"could not be put into words" in all_of(read)
    os.close(read)
    for _ in range(100):
        output.emit(record("x" * AT_ONCE_BYTES))
    output.close()
    os.close(write)


def test_a_daemon_whose_words_nobody_reads_serves_and_stops(tmp_path: Path) -> None:
    """Standard output is closed, standard error a full pipe; its terminal ends."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    while True:
        try:
            os.write(write, b"x" * AT_ONCE_BYTES)
        except BlockingIOError:
            break
    os.set_blocking(write, True)
    nobody, out = os.pipe()
    os.close(nobody)
    place = tmp_path / "s.sock"
    words = ["serve", "--listen", str(place), "--dram", "16MiB", "--dram-dir", str(tmp_path), "--metrics", ""]
    program = [sys.executable, "-c", "from kvstore.cli.main import main; raise SystemExit(main())"]
    with subprocess.Popen([*program, *words], stdout=out, stderr=write) as daemon:
        os.close(write)
        os.close(out)
        for number in range(1000):
            try:
                with KVClient(str(place), name=f"client {number}") as client:
                    client.stats()
                break
            except errors.Unavailable:
                assert daemon.poll() is None
                time.sleep(0.02)
        daemon.send_signal(signal.SIGHUP)
        assert daemon.wait(30) == 0
    os.close(read)
