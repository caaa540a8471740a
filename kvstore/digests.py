"""Names files by what is in them: SHA-256, remembered beside the file's size and times so that weights are hashed once."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvstore.hashing import canonical_json

READ_BYTES = 4 * 2**20  # 4 MiB a read: large enough that the disk, not the loop, sets the pace
# Facts in a config.json that say where or by what it was written; the model computes the same whatever they are.
_VOLATILE = ("_name_or_path", "_model_name_or_path", "transformers_version")


def cache_folder() -> Path:
    """Where this program may keep what it can make again: $XDG_CACHE_HOME/kvstore, or ~/.cache/kvstore."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return Path(root if os.path.isabs(root) else Path.home() / ".cache") / "kvstore"


def write_atomically(path: Path, text: str) -> None:
    """Make or replace a small file; a reader sees the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(text)
    os.replace(name, path)


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hex; from memory where size, inode and times are those it was last hashed at."""
    stat = path.stat()
    place = str(path.resolve())
    facts: dict[str, object] = {"path": place, "stat": [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]}
    memory = cache_folder() / "digests" / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.json"
    known = _read_json(memory)
    if {name: known.get(name) for name in facts} == facts and isinstance(known.get("sha256"), str):
        return str(known["sha256"])
    with path.open("rb") as source:
        digest = hashlib.sha256()
        while piece := source.read(READ_BYTES):
            digest.update(piece)
    write_atomically(memory, json.dumps({**facts, "sha256": digest.hexdigest()}))
    return digest.hexdigest()


def files_digest(paths: Iterable[Path], extra: Mapping[str, str] | None = None) -> str:
    """One digest over several files by their names, and over named texts; "" where there are none."""
    facts = {path.name: file_digest(path) for path in paths} | dict(extra or {})
    return "sha256:" + hashlib.sha256(canonical_json(facts)).hexdigest() if facts else ""


def config_text(folder: Path) -> str:
    """A model's config.json in one canonical form, without what does not change its result."""
    facts = {name: value for name, value in _read_json(folder / "config.json").items() if name not in _VOLATILE}
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
