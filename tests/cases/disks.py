"""Disks that fail: writes cut short, a file system that is full, bits that flip."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def limit_files(pid: int, size_bytes: int | None) -> None:
    """No write of this process may pass this place in a file: one across it is cut short, one beyond it fails. None: no limit."""
    soft = resource.RLIM_INFINITY if size_bytes is None else size_bytes
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))


@contextmanager
def tiny_disk(path: Path, size_bytes: int) -> Iterator[bool]:
    """A file system of this size at `path`. False where this user may not mount one: then it is an ordinary directory."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(path)]
    may = os.geteuid() == 0 and shutil.which("mount") is not None
    mounted = may and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)


def flip(path: Path, at: int, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), at)
