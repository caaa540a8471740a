"""LoRA adapters by the digest of their files: names and paths can come to mean other weights."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.digests import files_digest

_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "adapter_config.json")


@dataclass(frozen=True)
class Adapter:
    """`digest` of its files, "" for the model as it is. Not `known`: requests with it neither load nor store."""

    digest: str
    known: bool


NO_ADAPTER = Adapter("", known=True)
UNKNOWN = Adapter("", known=False)


@dataclass
class _Hashing:
    result: Future[str]
    give_up_at: float


class Adapters:
    """Hashes each version of an adapter once, in a thread of its own. Called by one thread."""

    def __init__(self) -> None:
        self._of: dict[tuple[object, ...], _Hashing] = {}

    def digest(self, lora: Any, timeout_s: float) -> Adapter | None:
        """The adapter of vLLM's LoRARequest (None: no adapter); None while it is being hashed, for `timeout_s` at most."""
        if lora is None:
            return NO_ADAPTER
        try:
            files = _files(Path(lora.lora_path))
            stats = [(file, file.stat()) for file in files]
        except (OSError, ValueError):  # a link to nothing, a folder that may not be read, a path that is none
            return UNKNOWN
        if not files:
            return UNKNOWN  # not a folder here: nothing says which weights it has
        key = tuple((str(file), stat.st_size, stat.st_ino, stat.st_mtime_ns) for file, stat in stats)
        hashing = self._of.get(key)
        if hashing is None:
            hashing = self._of[key] = _Hashing(Future(), time.monotonic() + timeout_s)
            threading.Thread(target=_hash, args=(files, hashing.result), name="kvstore-adapter", daemon=True).start()
        if hashing.result.done():
            return UNKNOWN if hashing.result.exception() else Adapter(hashing.result.result(), known=True)
        return None if time.monotonic() < hashing.give_up_at else UNKNOWN


def _files(folder: Path) -> list[Path]:
    return sorted(file for pattern in _PATTERNS for file in folder.glob(pattern)) if folder.is_dir() else []


def _hash(files: list[Path], result: Future[str]) -> None:
    try:
        result.set_result(files_digest(files))
    except OSError as error:
        result.set_exception(error)
