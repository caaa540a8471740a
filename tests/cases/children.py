"""Client processes of their own, which a test can kill and stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from kvstore import errors

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 60.0  # seconds: far beyond what a command takes on a loaded machine


class Child:
    """One `child.Program`, or another program that answers as it does. Use it in a `with` block, which kills it at the end."""

    program = "tests.cases.child"

    def __init__(self, address: str, **environment: str) -> None:
        command = [sys.executable, "-m", self.program, address]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environment})

    def say(self, command: str, *arguments: object) -> None:
        """Send a command; `hear` its answer later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The answer to the oldest command. Raises what the command raised."""
        assert self._process.stdout is not None
        stuck = threading.Timer(ANSWER_S, self._process.kill)
        stuck.start()
        line = self._process.stdout.readline()
        stuck.cancel()
        assert line, f"the child ended with status {self._process.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["text"])
        return answer["value"]

    def ask(self, command: str, *arguments: object) -> Any:
        """Send a command and wait for its answer."""
        self.say(command, *arguments)
        return self.hear()

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """SIGSTOP: the process hangs."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
