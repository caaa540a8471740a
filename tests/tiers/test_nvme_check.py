"""`kvstore fsck` finds what is wrong, all of it, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from kvstore.cli.main import main
from kvstore.geometry import UNIT_BYTES
from tests.tiers.disk import BLOCK_BYTES, Disk, block_hash, damage, found, place_of_record, store, units_of


def fsck(disk: Disk, *options: str) -> int:
    return main(["fsck", str(disk.directory), *options])


def test_a_sound_directory_is_found_sound(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(disk.filled(12).stop_clean())
    before = {path.name: path.read_bytes() for path in disk.directory.iterdir()}
    assert fsck(disk) == 0
    assert capsys.readouterr().out == f"12 blocks, {12 * BLOCK_BYTES / 1024:.1f} KiB; 0 bad\n"
    assert {path.name: path.read_bytes() for path in disk.directory.iterdir()} == before


def test_a_crash_is_mentioned_and_no_problem(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    disk.filled(1).close()
    assert fsck(disk) == 0
    assert "not a clean one" in capsys.readouterr().out


def test_every_kind_of_damage_is_named_and_repaired(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    tier = disk.filled(20)
    store(tier, 3, units_of(18))
    tier.close()
    damage(disk.directory / "data", units_of(7) * UNIT_BYTES + BLOCK_BYTES - 1)
    damage(disk.directory / "data", units_of(8) * UNIT_BYTES + BLOCK_BYTES)  # padding
    damage(disk.directory / "records", place_of_record(5) + 40)
    raw = bytearray((disk.directory / "records").read_bytes())
    raw[place_of_record(10) : place_of_record(10) + 128] = raw[place_of_record(11) : place_of_record(11) + 128]
    (disk.directory / "records").write_bytes(raw)
    assert fsck(disk) == 1
    out = capsys.readouterr().out
    assert "17 blocks" in out
    assert f"bad block {block_hash(7)[:6].hex()}… at byte {units_of(7) * UNIT_BYTES}: wrong bytes" in out
    assert "1 torn records" in out
    assert "1 records of another place" in out
    assert "1 older copies" in out
    assert "run again with --repair" in out
    assert fsck(disk, "--repair") == 1
    assert "repaired" in capsys.readouterr().out
    assert fsck(disk) == 0
    assert sorted(found(disk.open())) == [n for n in range(20) if n not in (5, 7, 10, 18)]


def test_a_truncated_data_file_is_a_problem(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    disk.filled(10).close()
    os.truncate(disk.directory / "data", units_of(6) * UNIT_BYTES)
    assert fsck(disk) == 1
    assert "4 records of another place" in capsys.readouterr().out


def test_a_directory_in_use_is_left_alone(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    disk.filled(1)
    for options in ((), ("--repair",), ("--clear",)):
        assert fsck(disk, *options) == 2
        assert "in use by another process" in capsys.readouterr().err
    assert (disk.directory / "data").exists()


def test_another_format_is_refused_and_can_be_cleared(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    disk.filled(5).close()
    path = disk.directory / "format.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    (disk.directory / "mine.txt").write_text("keep")
    assert fsck(disk) == 2
    assert f"kvstore fsck --clear {disk.directory}" in capsys.readouterr().err
    assert fsck(disk, "--clear") == 0
    assert sorted(each.name for each in disk.directory.iterdir()) == ["mine.txt", "owner"]
    assert found(disk.open()) == {}


@pytest.mark.parametrize("options", [(), ("--repair",), ("--clear",)])
def test_a_directory_without_blocks_is_not_touched(tmp_path: Path, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").write_text("somebody's")
    for path in (tmp_path, tmp_path / "none"):
        assert fsck(Disk(path), *options) == 2
        assert "no blocks of kvstore here" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_missing_files_are_an_error_in_words(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    disk.filled(1).close()
    (disk.directory / "data").unlink()
    assert fsck(disk) == 2
    assert "data is missing" in capsys.readouterr().err
