"""Arenas that killed daemons left in shared memory, which nobody gives back: the next daemon of another socket takes one of its own."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from kvstore.config import format_bytes
from kvstore.tiers.arena_file import MAGIC
from kvstore.tiers.owner_lock import owned

MAX_NAMED = 8  # folders: a line stays one that people read


def left_behind(own: Path) -> str:
    """One line that names the arenas beside the folder `own` whose daemons are gone, with their sizes and how to remove them; else empty.

    Only named: a process may have one mapped still, and its daemon may come back to it.
    """
    found = sorted(_abandoned(own), key=lambda each: -each[1])
    if not found:
        return ""
    total = format_bytes(sum(size_bytes for _, size_bytes in found))
    named = ", ".join(f"{folder} ({format_bytes(size_bytes)})" for folder, size_bytes in found[:MAX_NAMED])
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    remedy = "rm -r " + " ".join(shlex.quote(str(folder)) for folder, _ in found[:MAX_NAMED])
    return f"dram: {total} of shared memory are left by daemons that are gone: {named}{more}; unless they come back: {remedy}"


def _abandoned(own: Path) -> Iterator[tuple[Path, int]]:
    """Folders of this user's that hold an arena and have no owner, each with the bytes that it takes."""
    for folder in own.parent.glob("kvstore-*"):
        try:
            if folder != own and not folder.is_symlink() and _is_arena(folder / "arena") and not owned(folder / "owner"):
                yield folder, (folder / "arena").stat().st_blocks * 512  # st_blocks counts 512 bytes, whatever the file system's block
        except OSError:
            continue  # somebody else's, or gone meanwhile


def _is_arena(path: Path) -> bool:
    """Whether this user may remove it, and it is one of whatever size. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and os.pread(fd, len(MAGIC), 0) == MAGIC
    finally:
        os.close(fd)
