"""The nvme tier's directory: its format and identity, its owner, whether the last stop was clean, and its namespaces."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError, FormatError
from kvstore.geometry import UNIT_BYTES
from kvstore.tiers import small_files
from kvstore.tiers.owner_lock import OwnerLock

MAX_EXTENT_UNITS = 1 << 18  # units: 1 GiB, the largest extent that is ever chosen
MAX_NUMBER = 1 << 24  # of a namespace here: it counts those that were ever added, of which a few thousand are known at once
DIGEST_BYTES = 32  # SHA-256
FORMAT_VERSION = 1  # of everything in the directory: raise it when the meaning of any file changes
OWN_FILES = ("probe", "data", "records", "namespaces.json", "clean.json", "format.json")  # removed in this order by `clear`


@dataclass(frozen=True)
class Layout:
    """What `format.json` says."""

    identity: str
    capacity_bytes: int
    extent_units: int

    def to_json(self) -> dict[str, object]:
        """As the file has it."""
        return {
            "format": FORMAT_VERSION,
            "identity": self.identity,
            "unit_bytes": UNIT_BYTES,
            "capacity_bytes": self.capacity_bytes,
            "extent_units": self.extent_units,
        }


@dataclass(frozen=True)
class StoredNamespace:
    """A namespace with blocks here. `number` is short for its digest in the records; `facts` is whatever the daemon wants back."""

    number: int
    digest: bytes
    facts: Mapping[str, Any]


class NvmeDirectory:
    """Held by one process at a time. Its methods are called from one event loop."""

    def __init__(self, path: Path, lock: OwnerLock) -> None:
        self.path = path
        self.layout = Layout("", 0, 0)
        self.stopped_clean = False
        self.namespaces: dict[bytes, StoredNamespace] = {}
        self._lock = lock
        self._writing = asyncio.Lock()

    @classmethod
    async def take(cls, path: Path, fresh: Layout | None) -> NvmeDirectory:
        """Take the directory and read what it says of itself; changes nothing in it yet.

        `fresh`: the layout where it is new or empty; None: then it is refused. Raises ConfigError, FormatError.
        """
        directory = cls(path, _taken(path, make=fresh is not None))
        try:
            await directory._read(fresh)
        except BaseException:
            directory.close()
            raise
        return directory

    async def begin(self, capacity_bytes: int) -> None:
        """Blocks may change from now on: the capacity is this, and until `mark_clean` a stop is not a clean one."""
        self.layout = replace(self.layout, capacity_bytes=capacity_bytes)
        await small_files.replace_json(self.path / "format.json", self.layout.to_json())
        await small_files.remove(self.path / "clean.json")

    async def add_namespace(self, digest: bytes, facts: Mapping[str, Any]) -> StoredNamespace:
        """The namespace, durable on return: from then on its blocks may have records here. Its facts are replaced.

        Raises ResourceExhausted, Unavailable.
        """
        async with self._writing:
            known = self.namespaces.get(digest)
            number = known.number if known else 1 + max((each.number for each in self.namespaces.values()), default=0)
            added = StoredNamespace(number, digest, dict(facts))
            if known != added:
                everyone = {**self.namespaces, digest: added}
                await small_files.replace_json(self.path / "namespaces.json", [_namespace_json(each) for each in everyone.values()])
                self.namespaces = everyone
            return added

    async def forget_namespaces(self, digests: Collection[bytes]) -> None:
        """These are not known any more; no record may name one. Raises as `add_namespace` does."""
        async with self._writing:
            left = {digest: each for digest, each in self.namespaces.items() if digest not in digests}
            await small_files.replace_json(self.path / "namespaces.json", [_namespace_json(each) for each in left.values()])
            self.namespaces = left

    async def mark_clean(self) -> None:
        """Say that everything is on disk and nothing will be written any more."""
        await small_files.replace_json(self.path / "clean.json", {"identity": self.layout.identity})

    def close(self) -> None:
        """Let others have the directory. Idempotent."""
        self._lock.release()

    async def _read(self, fresh: Layout | None) -> None:
        for name in OWN_FILES:  # a pipe, say, would be waited for without end
            if (self.path / name).exists() and not (self.path / name).is_file():
                raise FormatError(f"{self.path / name} is no ordinary file; move it away")
        found = await _json(self.path / "format.json")
        if found is None:
            if fresh is None or any((self.path / name).exists() for name in OWN_FILES):
                raise FormatError(f"{self.path}: blocks without format.json; {_clear_advice(self.path)}")
            self.layout, self.stopped_clean = fresh, True
            return
        self.layout = _parsed_layout(self.path, found)
        self.stopped_clean = (self.path / "clean.json").exists()
        self.namespaces = _parsed_namespaces(self.path, await _json(self.path / "namespaces.json"))


def clear(path: Path) -> list[str]:
    """Remove the blocks of a directory of any format version; returns the names removed. Raises ConfigError while it is in use."""
    _require_ours(path)
    lock = _lock(path)
    try:
        names = [*(f"{name}.new" for name in OWN_FILES), *OWN_FILES]  # a stop while one was replaced may have left a part
        removed = [name for name in names if (path / name).exists()]
        if odd := [name for name in removed if not (path / name).is_file()]:
            raise ConfigError(f"{path / odd[0]} is no ordinary file; move it away")
        for name in removed:
            (path / name).unlink()
        small_files.sync_directory(path)
        return removed
    finally:
        lock.release()


def _taken(path: Path, *, make: bool) -> OwnerLock:
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        else:
            _require_ours(path)
        return _lock(path)
    except OSError as error:
        raise ConfigError(f"nvme directory {path}: {error.strerror}; name a directory that this user may write") from error


def _lock(path: Path) -> OwnerLock:
    return OwnerLock(path / "owner", "stop that daemon, or give this one another directory with --nvme")


def _require_ours(path: Path) -> None:
    if not any((path / name).is_file() for name in ("format.json", "records")):
        raise ConfigError(f"{path}: no blocks of kvstore here; name the directory given to kvstore serve --nvme")


async def _json(path: Path) -> Any:
    """None where there is no such file. Raises FormatError where what it holds is no JSON."""
    try:
        return await small_files.read_json(path)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: damaged ({error}); {_clear_advice(path.parent)}") from error


def _parsed_layout(path: Path, found: Any) -> Layout:
    if not isinstance(found, dict) or found.get("format") != FORMAT_VERSION:
        version = found.get("format") if isinstance(found, dict) else "unknown"
        raise FormatError(f"{path}: format {version}, this kvstore reads format {FORMAT_VERSION}; {_clear_advice(path)}")
    sizes: list[Any] = [found.get(name) for name in ("unit_bytes", "capacity_bytes", "extent_units")]
    identity = found.get("identity")
    positive = all(type(size) is int and size > 0 for size in sizes)
    if not positive or not isinstance(identity, str) or sizes[0] != UNIT_BYTES or sizes[2] > MAX_EXTENT_UNITS:
        raise FormatError(f"{path}: format.json is damaged; {_clear_advice(path)}")
    return Layout(identity, sizes[1], sizes[2])


def _parsed_namespaces(path: Path, found: Any) -> dict[bytes, StoredNamespace]:
    try:
        each = [_parsed_namespace(one) for one in found or []]
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(f"{path}: namespaces.json is damaged ({error}); {_clear_advice(path)}") from error
    if len({one.number for one in each}) < len(each) or len({one.digest for one in each}) < len(each):
        raise FormatError(f"{path}: namespaces.json names one twice; {_clear_advice(path)}")
    return {one.digest: one for one in each}


def _parsed_namespace(found: Any) -> StoredNamespace:
    """Raises TypeError, KeyError, ValueError."""
    number: Any = found["number"]
    digest = bytes.fromhex(found["digest"])
    if type(number) is not int or not 0 < number <= MAX_NUMBER or len(digest) != DIGEST_BYTES:
        raise ValueError(f"number {number}, digest of {len(digest)} bytes")
    return StoredNamespace(number, digest, dict(found["facts"]))


def _namespace_json(namespace: StoredNamespace) -> dict[str, object]:
    return {"number": namespace.number, "digest": namespace.digest.hex(), "facts": dict(namespace.facts)}


def _clear_advice(path: Path) -> str:
    return f"run: kvstore fsck --clear {path}"
