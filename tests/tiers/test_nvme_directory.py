"""A directory has one owner, one format, and its namespaces."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.errors import ConfigError, FormatError, ResourceExhausted
from kvstore.tiers import nvme, nvme_directory
from tests.tiers.disk import (
    NAMESPACE,
    Disk,
    found,
    units_of,
)

WAIT_S = 10.0  # seconds: far beyond what a loop that runs needs for a step


def test_a_second_owner_is_told_who_has_it(disk: Disk) -> None:
    tier = disk.filled(1)
    with pytest.raises(ConfigError, match=rf"in use by another process \(pid {os.getpid()}\); stop that daemon"):
        disk.open()
    tier.close()
    disk.open().close()


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_format_is_refused_with_the_command_that_clears_it(disk: Disk, version: object) -> None:
    disk.filled(1).close()
    path = disk.directory / "format.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": version}))
    with pytest.raises(FormatError, match=f"kvstore fsck --clear {disk.directory}"):
        disk.open()
    assert "data" in nvme_directory.clear(disk.directory)
    assert found(disk.open()) == {}


@pytest.mark.parametrize("name", ["format.json", "namespaces.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": 1}', '"x"'])
def test_a_damaged_small_file_is_refused_with_the_command_that_clears_it(disk: Disk, name: str, text: str) -> None:
    disk.filled(1).close()
    (disk.directory / name).write_text(text)
    with pytest.raises(FormatError, match=f"kvstore fsck --clear {disk.directory}"):
        disk.open()


def test_blocks_without_a_format_are_refused(disk: Disk) -> None:
    disk.filled(1).close()
    (disk.directory / "format.json").unlink()
    with pytest.raises(FormatError, match="fsck --clear"):
        disk.open()


def test_an_identity_stays_with_its_directory(disk: Disk) -> None:
    tier = disk.open()
    identity = tier.directory.layout.identity
    tier.close()
    assert disk.open().directory.layout.identity == identity


def test_namespaces_added_at_once_all_last(disk: Disk) -> None:
    tier = disk.open()

    async def add() -> None:
        await asyncio.gather(*(tier.add_namespace(bytes([n]) * 32, {"n": n}) for n in range(20)))

    asyncio.run(add())
    tier.close()
    namespaces = disk.open().namespaces
    assert {digest[0]: each.facts["n"] for digest, each in namespaces.items()} == {n: n for n in range(20)}
    assert sorted(each.number for each in namespaces.values()) == list(range(1, 21))


def test_a_namespace_that_cannot_be_kept_is_not_added(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk.filled(1)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ResourceExhausted, match="free some room"):
            asyncio.run(tier.add_namespace(bytes(32), {}))
    assert set(tier.namespaces) == {NAMESPACE}
    tier.close()
    tier = disk.open()
    assert set(tier.namespaces) == {NAMESPACE}
    assert asyncio.run(tier.add_namespace(bytes(32), {})).number == 2


@pytest.mark.parametrize("step", ["_prepare_data", "RecordFile", "sync_directory"])
def test_a_first_start_that_failed_does_not_stop_the_next(disk: Disk, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Whatever ended it: too little room, or a kill while the files were made."""
    with monkeypatch.context() as patch:
        patch.setattr(nvme, step, _no_room)
        with pytest.raises(ConfigError, match="asked"):
            disk.open()
    disk.filled(3).close()
    assert found(disk.open()) == {number: units_of(number) for number in range(3)}


def test_a_first_start_that_took_no_room_decides_no_sizes(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(nvme, "_prepare_data", _no_room)
        with pytest.raises(ConfigError, match="asked"):
            disk.open()
    assert replace(disk, extent_units=8).open().extent_units == 8


def _no_room(path: Path, *_: object) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.name == "data":
        path.touch()
    raise ConfigError("nvme data: more asked than there is")


@pytest.mark.parametrize("name", ["data", "records", "namespaces.json", "probe"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_refused_and_not_cleared(disk: Disk, name: str, make: Callable[[Path], None]) -> None:
    disk.filled(1).close()
    (disk.directory / name).unlink(missing_ok=True)
    make(disk.directory / name)
    with pytest.raises(FormatError, match=f"{name} is no ordinary file; move it away"):
        disk.open()
    with pytest.raises(ConfigError, match=f"{name} is no ordinary file; move it away"):
        nvme_directory.clear(disk.directory)
    assert (disk.directory / "format.json").exists(), "nothing is removed"


def test_the_event_loop_runs_while_a_namespace_is_written(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk.filled(1)
    begun, may_end, encoded = threading.Event(), threading.Event(), json.dumps

    def waiting(*values: object, **settings: bool) -> str:
        begun.set()
        assert may_end.wait(WAIT_S), "the loop stands still"
        return encoded(*values, **settings)  # type: ignore[arg-type]

    async def add() -> None:
        adding = asyncio.create_task(tier.add_namespace(bytes(32), {"tenant": "u"}))
        while not begun.is_set():  # noqa: ASYNC110 — a thread sets it
            await asyncio.sleep(0.001)
        may_end.set()
        await adding

    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", waiting)
        asyncio.run(add())
    tier.close()
    assert set(disk.open().namespaces) == {NAMESPACE, bytes(32)}


@pytest.mark.parametrize("value", [0, -1, True, 1.0, 2**40, "1", None])
def test_a_namespaces_number_that_cannot_be_is_refused(disk: Disk, value: object) -> None:
    disk.filled(1).close()
    path = disk.directory / "namespaces.json"
    path.write_text(json.dumps([{**each, "number": value} for each in json.loads(path.read_text())]))
    with pytest.raises(FormatError, match=r"namespaces\.json is damaged"):
        disk.open()
