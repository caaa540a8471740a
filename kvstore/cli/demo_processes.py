"""The processes of the demo: a real daemon, and workers behind pipes. Every wait has a deadline, and all end with their `with` block."""

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from kvstore.errors import ConfigError, DeadlineExceeded, Unavailable

DRAM_BYTES = NVME_BYTES = 2**30  # 1 GiB: three prompts of 4,000 tokens take 276 MB of it
START_TIMEOUT_S = 120.0  # a daemon takes a second; memory and disk of a busy machine may take longer
LOAD_TIMEOUT_S = 300.0  # a model loads in seconds, but is converted first where that was never done
ANSWER_TIMEOUT_S = 600.0  # a cold prompt of 4,000 tokens takes seconds; a busy machine may take minutes
STOP_TIMEOUT_S = 20.0  # seconds for an orderly end: twice what the daemon gives its writes
_IN_MEMORY = ("tmpfs", "ramfs")  # kinds of file system that a power failure, and our claim, would not survive


@dataclass(frozen=True)
class Places:
    """Where the demo keeps things: shared memory, a folder on a disk, and the daemon's socket."""

    memory: Path
    disk: Path
    socket: Path


@contextmanager
def places() -> Iterator[Places]:
    """Folders of the demo's own, removed at the end. Raises ConfigError where no disk can be written to."""
    disk = Path(tempfile.mkdtemp(prefix="kvstore-demo-", dir=_disk_folder()))
    memory = Path(tempfile.mkdtemp(prefix="kvstore-demo-", dir=_memory_folder(disk)))
    sockets = Path(tempfile.mkdtemp(prefix="kvstore-demo-"))
    try:
        yield Places(memory, disk, sockets / "kvstore.sock")
    finally:
        for folder in (memory, disk, sockets):
            shutil.rmtree(folder, ignore_errors=True)


class _Child:
    """A process whose lines of output are read as they come. A session of its own, so that Ctrl-C reaches only the demo."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self._lines.put(line)
        self._lines.put("")

    def line(self, timeout_s: float) -> str:
        """The next line. Raises DeadlineExceeded, and Unavailable with the end of the log where the process has ended."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(f"{self.name}: no answer within {timeout_s:.0f} s; is the machine busy?") from None
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()[-8:]
            raise Unavailable("\n".join([f"{self.name} has ended; it said:", *said]))
        return line

    def write(self, line: str) -> None:
        """Send a line."""
        stdin = self._process.stdin
        if stdin is None:
            raise Unavailable(f"{self.name} has no input")
        try:
            stdin.write(line + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: `line` says so, with its last words

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def stop(self, by_signal: bool, at_once: bool = False) -> None:
        """Ask it to end, by SIGTERM or by the end of its input; kill it where it does not, or where there is no time to ask."""
        if at_once:
            self._process.kill()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                self._process.stdin.close()
        if by_signal:
            self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()


class Daemon:
    """`kvstore serve` on the demo's places."""

    def __init__(self, where: Places) -> None:
        self._where = where
        self._child = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._child.stop(by_signal=True, at_once=kind is not None)

    def kill_and_restart(self) -> None:
        """kill -9, then a new daemon on the same folders."""
        self._child.kill()
        self._child = self._start()

    def _start(self) -> _Child:
        where = self._where
        flags = ["--listen", str(where.socket), "--metrics", "", "--dram", str(DRAM_BYTES), "--dram-dir", str(where.memory)]
        flags += ["--nvme", str(where.disk / "blocks"), "--nvme-bytes", str(NVME_BYTES)]
        run = "import sys; from kvstore.cli.main import main; sys.exit(main())"
        child = _Child("the daemon", ["-c", run, "serve", *flags], where.disk / "daemon.log")
        child.line(START_TIMEOUT_S)  # its readiness
        return child


class Worker:
    """A worker process; see `kvstore.worker.loop` for what it can be asked."""

    def __init__(self, where: Places, name: str) -> None:
        log = where.disk / f"{name.replace(' ', '-')}.log"
        self._child = _Child(f"the {name}", ["-m", "kvstore.worker", "--listen", str(where.socket)], log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._child.stop(by_signal=False, at_once=kind is not None)

    def loaded(self) -> None:
        """Wait until the model is loaded."""
        self._child.line(LOAD_TIMEOUT_S)

    def ask(self, operation: str, **arguments: object) -> dict[str, Any]:
        """One operation and its answer. Raises Unavailable where the worker could not do it."""
        self._child.write(json.dumps({"op": operation, **arguments}))
        answer: dict[str, Any] = json.loads(self._child.line(ANSWER_TIMEOUT_S))
        if "error" in answer:
            raise Unavailable(f"{self._child.name}, {operation}: {answer['error']}")
        return answer


def _disk_folder() -> Path:
    """A folder that lies on a disk, not in memory."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    tried = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path(cache) if cache else Path.home() / ".cache", Path.cwd()]
    for folder in tried:
        if folder.is_dir() and os.access(folder, os.W_OK) and _file_system(folder) not in _IN_MEMORY:
            return folder
    raise ConfigError(f"no writable folder on a disk among {', '.join(map(str, tried))}; set TMPDIR to one with 2 GiB free")


def _memory_folder(otherwise: Path) -> Path:
    """Shared memory, or where it is too small (as in many containers) the disk: mapped memory all the same."""
    shared = Path("/dev/shm")
    room = shutil.disk_usage(shared).free if os.access(shared, os.W_OK) else 0
    return shared if room > DRAM_BYTES + DRAM_BYTES // 8 else otherwise


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder lies on; "" where the system does not say."""
    place = os.path.realpath(folder)
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in mounts:
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if len(point) >= len(best) and (place == point or place.startswith(point.rstrip("/") + "/")):
            best, kind = point, after.split()[0]
    return kind
