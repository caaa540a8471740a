"""Directories of the disk tier as vandals leave them: every file damaged, replaced, or filled with what reads well and is nonsense."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.tiers import record_codec as codec
from kvstore.tiers.record_codec import RECORD_BYTES, RecordState

NUMBERS: tuple[Any, ...] = (0, -1, 1, 2, 3, 255, 2**31, 2**32 - 1, 2**40, 2**63, 2**64, 10**30, 1e308, 1.5, True)
OTHERS: tuple[Any, ...] = (None, "", "x", "12", [], {}, [[]], {"a": 1}, "é" * 50, "ff" * 31, "ff" * 32, "gg" * 32)
TEXTS = (b"", b"\xff\xfe\x00", b"null", b"[]", b"{}", b"[1]", b'"x"', b"[" * 200_000, b"1e400", b'{"format": 1}', b"NaN")
FIELDS = ("state", "namespace", "slot_units", "units", "generation", "block_bytes", "hash", "parent", "checksum", "sequence")  # of a record
JSON_FILES = ("format.json", "namespaces.json", "clean.json")


def ruin(directory: Path, chance: random.Random) -> str:
    """Damage one thing; what was done."""
    ways: dict[Callable[[Path, random.Random], str], int] = {_json_value: 3, _json_text: 1, _records: 2, _sealed: 3, _file: 2}
    try:
        return chance.choices(list(ways), list(ways.values()))[0](directory, chance)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "nothing: it was ruined before"


def _json_value(directory: Path, chance: random.Random) -> str:
    """One value of a JSON file becomes another one."""
    path = directory / chance.choice(JSON_FILES[:2])
    found = json.loads(path.read_text())
    places = list(_places(found))
    holder, key = chance.choice(places)
    value = chance.choice(NUMBERS + OTHERS)
    if chance.random() < 0.15:
        del holder[key]
    else:
        holder[key] = value
    path.write_text(json.dumps(found))
    return f"{path.name}: {key} = {value!r}"


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every value in a JSON document, as what holds it and under which key."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def _json_text(directory: Path, chance: random.Random) -> str:
    path = directory / chance.choice(JSON_FILES)
    text = chance.choice(TEXTS)
    if chance.random() < 0.5 and path.exists():
        whole = bytearray(path.read_bytes())
        at = chance.randrange(len(whole))
        text = bytes(whole[:at]) if chance.random() < 0.5 else bytes(whole[:at] + chance.randbytes(3) + whole[at + 1 :])
    path.write_bytes(text)
    return f"{path.name}: {text[:40]!r}"


def _records(directory: Path, chance: random.Random) -> str:
    """Bytes of the file of records, or its length."""
    path = directory / "records"
    size_bytes = path.stat().st_size
    match chance.randrange(4):
        case 0:
            cut = chance.choice((0, 1, RECORD_BYTES, 40 * RECORD_BYTES + 7, size_bytes - 1, size_bytes + 1, 3 * size_bytes))
            os.truncate(path, cut)
            return f"records: {cut} bytes"
        case 1:
            path.write_bytes(chance.randbytes(200_000))
            return "records: noise"
        case 2:
            path.write_bytes(chance.choice((b"\xff", b"\0")) * size_bytes)
            return "records: all the same"
        case _:
            with path.open("r+b") as file:
                for _ in range(30):
                    os.pwrite(file.fileno(), chance.randbytes(8), chance.randrange(80) * RECORD_BYTES + 8 * chance.randrange(16))
            return "records: torn"


def _sealed(directory: Path, chance: random.Random) -> str:
    """Records that are whole, and say what cannot be: another slot, another size, too many bytes, a namespace that is not there."""
    path = directory / "records"
    with path.open("r+b") as file:
        data = bytearray(os.pread(file.fileno(), 120 * RECORD_BYTES, 0))
        records = np.frombuffer(data, codec.RECORD)
        used = np.flatnonzero(codec.intact(records))
        names = []
        for at in chance.choices(used.tolist(), k=chance.randint(1, 6)):
            name = chance.choice(FIELDS)
            names.append(name)
            if name == "hash":
                records[name][at] = records["hash"][chance.choice(used.tolist())]
            elif name == "parent":
                records[name][at] = records["hash"][at]
            elif name == "state":
                records[name][at] = chance.choice([*RecordState, 77])
            else:
                limit = np.iinfo(codec.RECORD[name].base).max
                records[name][at] = min(abs(int(chance.choice(NUMBERS[:11]))), int(limit))
        codec.seal(records[used])
        sealed = codec.seal(records[used].copy())
        records[used] = sealed
        os.pwrite(file.fileno(), data, 0)
    return f"records: {', '.join(names)}"


def _file(directory: Path, chance: random.Random) -> str:
    """A file is missing, or something else."""
    path = directory / chance.choice(("data", "records", "format.json", "namespaces.json", "clean.json", "owner", "probe"))
    if path.exists():
        path.unlink()
    match chance.choice(("missing", "folder", "pipe", "link to nothing", "link to a device", "empty", "short")):
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link to nothing":
            path.symlink_to("nowhere/at/all")
        case "link to a device":
            path.symlink_to("/dev/full")
        case "empty":
            path.touch()
        case "short":
            path.write_bytes(b"x" * 5000)
        case _:
            pass
    return f"{path.name}: {path.stat(follow_symlinks=False).st_mode if path.exists() or path.is_symlink() else 'missing'}"


def copy(directory: Path, target: Path) -> Path:
    """A directory to ruin."""
    shutil.copytree(directory, target, ignore=shutil.ignore_patterns("owner"))
    return target
