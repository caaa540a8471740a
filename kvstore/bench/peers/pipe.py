"""A driver's process from this side: commands and answers through pipes, and an end to it whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

ANSWER_TIMEOUT_S = 90.0  # seconds for one answer, the start of a server that imports torch included
END_TIMEOUT_S = 40.0  # seconds for a driver to end itself and its servers, each of which it gives 15
REASON_LINES = 3  # lines of its log that are quoted where a driver died


class PeerFailed(Exception):
    """A peer that cannot run, or ran no further; the text is the reason."""


class Driver:
    """One driver process in a process group of its own. Use it in a `with` block."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        """Starts it. `log` gets what it and its servers print. Raises PeerFailed where it does not come up."""
        self._log = log
        self._timeout_s = timeout_s
        settings = {**os.environ, **(environment or {})}
        pipe = subprocess.PIPE
        try:
            with log.open("ab") as errors:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=settings, start_new_session=True)
        except OSError as error:
            raise PeerFailed(f"{command[0]}: {error.strerror}") from None
        self._commands, self._answers = _opened(self._process.stdin), _opened(self._process.stdout)
        try:
            self.about = {key: str(value) for key, value in self._answer().items()}
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **fields: object) -> dict[str, Any]:
        """Have a command carried out. Raises PeerFailed with its reason where it is not."""
        try:
            self._commands.write((json.dumps({"do": do, **fields}) + "\n").encode())
            self._commands.flush()
        except OSError:
            raise PeerFailed(self._how_it_ended()) from None
        return self._answer()

    def close(self) -> None:
        """End the driver and what it started. Idempotent."""
        with suppress(OSError):  # what it did not read any more
            self._commands.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        self._kill()
        self._process.wait()
        self._answers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        late = threading.Event()

        def stop() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(self._timeout_s, stop)
        timer.start()
        try:
            line = self._answers.readline()
        finally:
            timer.cancel()
        if late.is_set():
            raise PeerFailed(f"no answer within {self._timeout_s:g} s")
        if not line:
            raise PeerFailed(self._how_it_ended())
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise PeerFailed(f"its driver said {line[:200]!r}, which is no JSON object")
        if "error" in answer:
            raise PeerFailed(str(answer["error"]))
        return answer

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join([f"its driver ended with status {self._process.returncode}", *lines[-REASON_LINES:]])

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _opened(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise RuntimeError("the process was started without a pipe")
    return pipe
