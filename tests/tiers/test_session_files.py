"""What a session's process may touch stays known for as long as the process lives, whoever else dies."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.errors import ResourceExhausted
from kvstore.tiers.session_files import SessionFile, surviving

ARENA = "a" * 32
UNITS = 100_000
HOLD = "import fcntl,sys,time; f=open(sys.argv[1]); fcntl.flock(f,fcntl.LOCK_EX); print('held',flush=True); time.sleep(600)"

Hold = Callable[[SessionFile], subprocess.Popen[str]]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Starts a process that holds a session's lock, as a client does."""
    processes: list[subprocess.Popen[str]] = []

    def start(file: SessionFile) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(file.path)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def units(*numbers: int) -> NDArray[np.uint32]:
    return np.array(numbers, dtype=np.uint32)


def test_a_process_is_gone_when_it_is_killed_not_when_it_stops(tmp_path: Path, hold: Hold) -> None:
    file = SessionFile.create(tmp_path, 7, ARENA, UNITS)
    assert file.process_gone()
    process = hold(file)
    assert not file.process_gone()
    process.send_signal(signal.SIGSTOP)
    assert not file.process_gone()
    process.kill()
    process.wait()
    assert file.process_gone()


def test_the_next_daemon_finds_who_survived_and_what_they_hold(tmp_path: Path, hold: Hold) -> None:
    files = [SessionFile.create(tmp_path, session, ARENA, UNITS) for session in (1, 2, 3)]
    elsewhere = SessionFile.create(tmp_path, 4, "b" * 32, UNITS)
    for file in files:
        file.mark(units(10 * file.session, 99_999), units())
    hold(files[0])
    hold(elsewhere)
    process = hold(files[2])
    (tmp_path / "junk").write_bytes(b"x" * 5000)
    (tmp_path / "empty").write_bytes(b"")
    for file in (*files, elsewhere):
        file.close()
    left = surviving(tmp_path, ARENA)
    assert [(file.session, file.marked_units().tolist()) for file in left] == [(1, [10, 99_999]), (3, [30, 99_999])]
    assert sorted(tmp_path.iterdir()) == [file.path for file in left]
    process.kill()
    process.wait()
    assert [file.process_gone() for file in left] == [False, True]
    left[1].remove()
    assert sorted(tmp_path.iterdir()) == [left[0].path]


def test_one_session_number_in_two_runs_has_two_files(tmp_path: Path) -> None:
    assert SessionFile.create(tmp_path, 1, ARENA, UNITS).path != SessionFile.create(tmp_path, 1, ARENA, UNITS).path


SOME = st.lists(st.integers(0, UNITS - 1), max_size=30)
Steps = list[tuple[list[int], list[int]]]


@given(steps=st.lists(st.tuples(SOME, SOME), max_size=10))
def test_marks_are_exactly_what_was_granted_and_not_withdrawn(tmp_path_factory: pytest.TempPathFactory, steps: Steps) -> None:
    file = SessionFile.create(tmp_path_factory.mktemp("marks"), 1, ARENA, UNITS)
    expected: set[int] = set()
    for granted, withdrawn in steps:
        file.mark(units(*granted), units(*withdrawn))
        expected = (expected | set(granted)) - set(withdrawn)
    assert file.marked_units().tolist() == sorted(expected)
    file.remove()


def test_marks_take_memory_only_where_they_are(tmp_path: Path) -> None:
    file = SessionFile.create(tmp_path, 1, ARENA, 1 << 28)
    file.mark(units(5, (1 << 28) - 1), units())
    assert os.stat(file.path).st_size > 1 << 25
    assert os.stat(file.path).st_blocks * 512 <= 64 * 1024


def test_a_full_file_system_is_an_error_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SessionFile.create(tmp_path, 1, ARENA, UNITS)
    file.mark(units(1), units())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    file.mark(units(2), units())  # lies in a page that has memory already
    with pytest.raises(ResourceExhausted):
        file.mark(units(3, UNITS - 1), units())
    assert file.marked_units().tolist() == [1, 2]
    with pytest.raises(ResourceExhausted):
        SessionFile.create(tmp_path, 2, ARENA, UNITS)
    assert list(tmp_path.iterdir()) == [file.path]
