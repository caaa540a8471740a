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

    All of it in a thread: `value` must not change meanwhile. Raises ResourceExhausted where the disk is full, Unavailable on other
    faults; the file is then as it was.
    """
    await asyncio.to_thread(_replace, path, value)


def _replace(path: Path, value: object) -> None:
    fresh = path.with_name(f"{path.name}.new")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(_encoded(value))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise os_fault(path, "write", 0, error) from error


def _encoded(value: object) -> str:
    """With a line for each item or field. A long list takes its time: a call for each item, so that the event loop runs in between."""
    if isinstance(value, list):
        return "[\n" + ",\n".join(json.dumps(item, sort_keys=True) for item in value) + "\n]"
    return json.dumps(value, indent=1, sort_keys=True)


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
