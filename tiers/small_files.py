"""Small JSON files that are read whole, and replaced so that a stop at any moment leaves the old or the new, never a part."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import aiofiles
import aiofiles.os

from kvstore.tiers.direct_io import os_fault


async def read_json(path: Path) -> Any:
    """What the file holds. Raises FileNotFoundError, and ValueError where it is no JSON."""
    async with aiofiles.open(path, encoding="utf-8") as file:
        return json.loads(await file.read())


async def replace_json(path: Path, value: object) -> None:
    """The file holds `value` from now on, also after a power failure. One caller at a time for a path.

    Raises ResourceExhausted where the disk is full, Unavailable on other faults; the file is then as it was.
    """
    fresh = path.with_name(f"{path.name}.new")
    try:
        async with aiofiles.open(fresh, "w", encoding="utf-8") as file:
            await file.write(json.dumps(value, indent=1, sort_keys=True))
            await file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        await aiofiles.os.replace(fresh, path)
        await asyncio.to_thread(sync_directory, path.parent)
    except OSError as error:
        raise os_fault(path, "write", 0, error) from error


async def remove(path: Path) -> None:
    """The file is gone, also after a power failure; no error where there was none."""
    try:
        await aiofiles.os.unlink(path)
    except FileNotFoundError:
        return
    await asyncio.to_thread(sync_directory, path.parent)


def sync_directory(path: Path) -> None:
    """Names made, replaced and removed in the directory outlive a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
