"""Finds out, before memory or disk is taken, whether there is as much as was asked for, and says so in words where there is not."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from kvstore.config import format_bytes
from kvstore.errors import ConfigError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
_CGROUP_V2 = ("memory.max", "memory.current", "file", "shmem")
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class Request:
    """What is asked for, as the operator knows it."""

    what: str  # "dram arena"
    total_bytes: int
    advice: str  # "set --dram-bytes or mount a larger tmpfs"


def allocate(fd: int, directory: Path, request: Request) -> None:
    """Make the file as large as asked, all of it taken. Raises ConfigError, and takes nothing, where there is not enough."""
    require_disk(fd, directory, request)
    try:
        os.posix_fallocate(fd, 0, request.total_bytes)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        text = f"{request.what}: {format_bytes(request.total_bytes)} asked, {directory}: {error.strerror}; {request.advice}"
        raise ConfigError(text) from error


def require_disk(fd: int, directory: Path, request: Request) -> None:
    """Raises ConfigError where the file system of an open file has too little room for the rest of it."""
    place = os.fstatvfs(fd)
    require(request, missing(fd, request.total_bytes), place.f_bavail * place.f_frsize, str(directory))


def missing(fd: int, total_bytes: int) -> int:
    """How much of `total_bytes` the file does not yet have."""
    return max(0, total_bytes - os.fstat(fd).st_blocks * 512)  # st_blocks counts 512 bytes, whatever the file system's block


def require(request: Request, needed_bytes: int, free_bytes: int, place: str) -> None:
    """Raises ConfigError where `place` has less free than is still needed."""
    if needed_bytes > free_bytes:
        asked = format_bytes(request.total_bytes)
        raise ConfigError(f"{request.what}: {asked} asked, {place} has {format_bytes(free_bytes)} free; {request.advice}")


def memory_free(root: Path = Path("/")) -> tuple[int, str]:
    """The bytes of memory this process may still take, and the name of what limits them: the machine, or a control group."""
    limits = [(_machine_free(root), "the machine")]
    for folder in _cgroup_folders(root):
        for names in (_CGROUP_V2, _CGROUP_V1):
            free = _cgroup_free(folder, names)
            if free is not None:
                limits.append((free, f"the memory limit of control group {folder}"))
    return min(limits)


def _machine_free(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024  # meminfo counts KiB
    return _NO_LIMIT_BYTES


def _cgroup_folders(root: Path) -> list[Path]:
    """Every group that this process is in, and those around them: the tightest limit holds."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        number, controllers, inside = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("" if number == "0" else "memory")
        path = top / inside.lstrip("/")
        folders += [folder for folder in (path, *path.parents) if folder.is_relative_to(top)]
    return folders


def _cgroup_free(folder: Path, names: tuple[str, str, str, str]) -> int | None:
    """What the group may still take; page cache counts as free, since the kernel gives it up first. None: no limit here."""
    limit_name, usage_name, cache_name, shmem_name = names
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= _NO_LIMIT_BYTES:
            return None
        usage = int((folder / usage_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    droppable = int(stat.get(cache_name, 0)) - int(stat.get(shmem_name, 0))
    return max(0, int(limit) - usage + max(0, droppable))
