"""The arena outlives its daemon, belongs to one, and is never larger than the memory there is."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvstore.errors import ConfigError
from kvstore.geometry import UNIT_BYTES
from kvstore.tiers import memory as system
from kvstore.tiers import owner_lock, room
from kvstore.tiers.base import HealthState
from kvstore.tiers.dram import DramOptions, DramTier
from kvstore.tiers.owner_lock import OwnerLock, owned

EXTENT_UNITS = 64
CAPACITY_BYTES = 8 * EXTENT_UNITS * UNIT_BYTES
WAIT_S = 30.0  # seconds: far beyond what touching this little takes

Open = Callable[..., DramTier]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the arena in the test's directory; closes what is left open."""
    tiers: list[DramTier] = []

    def make(**changes: object) -> DramTier:
        options = DramOptions(tmp_path, "test", CAPACITY_BYTES, EXTENT_UNITS, epoch="first")
        tiers.append(DramTier(replace(options, **changes)))  # type: ignore[arg-type]
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def test_a_client_maps_the_same_bytes(opened: Open) -> None:
    tier = opened()
    fd = os.open(tier.path, os.O_RDWR)
    client = mmap.mmap(fd, tier.capacity_bytes, offset=tier.header_bytes)
    tier.memory[5 * UNIT_BYTES] = 7
    client[9 * UNIT_BYTES] = 8
    assert (client[5 * UNIT_BYTES], tier.memory[9 * UNIT_BYTES]) == (7, 8)
    assert os.fstat(fd).st_mode & 0o777 == 0o660
    assert os.fstat(fd).st_blocks * 512 >= tier.capacity_bytes
    os.close(fd)


def test_the_next_daemon_finds_bytes_and_extents(opened: Open) -> None:
    tier = opened()
    assert not tier.reused
    tier.memory[100:104] = b"kept"
    tier.extent_assigned(3, 5)
    tier.close()
    tier = opened(epoch="second")
    assert tier.reused
    assert tier.left_slot_units.tolist() == [0, 0, 0, 5, 0, 0, 0, 0]
    assert bytes(tier.memory[100:104]) == b"kept"
    assert b"second" in tier.path.read_bytes()[:UNIT_BYTES]


@pytest.mark.parametrize("change", [{"capacity_bytes": CAPACITY_BYTES * 2}, {"extent_units": 32}, {"capacity_bytes": CAPACITY_BYTES // 2}])
def test_another_shape_is_another_file(opened: Open, change: dict[str, object]) -> None:
    tier = opened()
    with tier.path.open("rb") as file:
        survivor = mmap.mmap(file.fileno(), tier.capacity_bytes, prot=mmap.PROT_READ, offset=tier.header_bytes)
    tier.memory[:4] = b"mine"
    tier.close()
    tier = opened(**change)
    tier.memory[:4] = b"else"
    assert not tier.reused
    assert tier.capacity_bytes == change.get("capacity_bytes", CAPACITY_BYTES)
    assert survivor[:4] == b"mine"


@pytest.mark.parametrize("damage", [b"", b"kvstore arena 2\n", b"\0" * 200])
def test_a_foreign_or_damaged_file_is_replaced(opened: Open, damage: bytes) -> None:
    tier = opened()
    tier.close()
    whole = tier.path.read_bytes()
    tier.path.write_bytes(damage + whole[len(damage) :] if damage else b"")
    assert not opened().reused


def test_a_link_in_the_arenas_place_is_not_followed(opened: Open, tmp_path: Path) -> None:
    opened().close()
    (tmp_path / "kvstore-test" / "arena").unlink()
    (tmp_path / "other").write_bytes(b"precious")
    (tmp_path / "kvstore-test" / "arena").symlink_to(tmp_path / "other")
    opened()
    assert (tmp_path / "other").read_bytes() == b"precious"


def test_two_daemons_cannot_share_an_arena(opened: Open) -> None:
    opened()
    with pytest.raises(ConfigError, match=rf"in use by another process \(pid {os.getpid()}\); .* another --dram-dir"):
        opened()
    opened(name="other")


def test_a_directory_that_others_may_write_is_refused(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "kvstore-test").mkdir()
    (tmp_path / "kvstore-test").chmod(0o777)
    with pytest.raises(ConfigError, match="another user may write there"):
        opened()


def test_more_than_the_file_system_has_is_refused_in_words(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dram arena: 8\.0 TiB asked, .* has .*B free; set --dram-bytes or mount a larger tmpfs"):
        opened(capacity_bytes=8 << 40, extent_units=1 << 20)
    assert [path.name for path in (tmp_path / "kvstore-test").iterdir() if "arena" in path.name] == []
    opened()


def killed(directory: Path, name: str) -> DramTier:
    """The arena of a daemon that was killed: its file stays, its lock is free."""
    tier = DramTier(DramOptions(directory, name, CAPACITY_BYTES, EXTENT_UNITS, epoch="first"))
    tier.close()
    return tier


def test_arenas_that_killed_daemons_left_are_named_with_size_and_remedy(opened: Open, tmp_path: Path) -> None:
    left = killed(tmp_path, "left").path.parent
    alive = opened(name="alive")
    (tmp_path / "kvstore-notes").mkdir()
    (tmp_path / "kvstore-notes" / "arena").write_bytes(b"somebody's own file")
    (tmp_path / "kvstore-notes" / "owner").touch()
    (tmp_path / "kvstore-link").symlink_to(left)
    (note,) = [note for note in opened(huge_pages=False).notes if "left by" in note]
    assert note == (
        f"dram: 4.0 MiB of shared memory are left by daemons that are gone: {left} (4.0 MiB); unless they come back: rm -r {left}"
    )
    assert str(alive.path.parent) not in note
    assert left.is_dir()


def test_without_such_arenas_nothing_is_said(opened: Open) -> None:
    opened(name="alive")
    assert not [note for note in opened().notes if "left by" in note]


def test_where_memory_does_not_suffice_what_was_left_is_named(opened: Open, tmp_path: Path) -> None:
    left = killed(tmp_path, "left").path.parent
    with pytest.raises(ConfigError, match=rf"8\.0 TiB asked, .* left by daemons that are gone: .*rm -r {left}"):
        opened(capacity_bytes=8 << 40, extent_units=1 << 20)


def test_a_lock_that_somebody_asks_about_can_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(tmp_path / "owner", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_SH)
    monkeypatch.setattr(owner_lock, "time", SimpleNamespace(sleep=lambda seconds: os.close(fd)))  # the question is over at the first pause
    lock = OwnerLock(tmp_path / "owner", "stop it")
    assert owned(tmp_path / "owner")
    lock.release()
    assert not owned(tmp_path / "owner")


def test_more_than_the_memory_limit_is_refused_in_words(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.tiers.arena_file.memory_free", lambda: (1 << 20, "the memory limit of control group /x"))
    with pytest.raises(ConfigError, match=r"4\.0 MiB asked, the memory limit of control group /x has 1\.0 MiB free; set --dram-bytes"):
        opened()


def test_less_than_an_extent_is_refused_in_words(opened: Open) -> None:
    with pytest.raises(ConfigError, match=r"4\.0 KiB asked, one extent is 256\.0 KiB; set a larger --dram-bytes"):
        opened(capacity_bytes=UNIT_BYTES)


def test_all_of_it_is_touched_and_nothing_changed(opened: Open) -> None:
    tier = opened(prefault=False)
    assert tier.touched_units == CAPACITY_BYTES // UNIT_BYTES
    tier.memory[:: 3 * UNIT_BYTES] = b"x" * len(tier.memory[:: 3 * UNIT_BYTES])
    before = bytes(tier.memory)
    tier.close()
    tier = opened()
    until = time.monotonic() + WAIT_S
    while tier.touched_units < CAPACITY_BYTES // UNIT_BYTES and time.monotonic() < until:
        time.sleep(0.001)
    assert tier.touched_units == CAPACITY_BYTES // UNIT_BYTES
    assert bytes(tier.memory) == before


def test_memory_that_cannot_be_taken_shows_in_health(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "touch", lambda _: "Cannot allocate memory")
    tier = opened()
    until = time.monotonic() + WAIT_S
    while tier.health().state is HealthState.OK and time.monotonic() < until:
        time.sleep(0.001)
    assert "Cannot allocate memory" in tier.health().reason
    assert tier.touched_units == 0


def test_removing_the_arena_leaves_mappings_alone(opened: Open) -> None:
    tier = opened()
    with tier.path.open("rb") as file:
        client = mmap.mmap(file.fileno(), tier.capacity_bytes, prot=mmap.PROT_READ, offset=tier.header_bytes)
    tier.memory[:4] = b"mine"
    tier.remove()
    assert not tier.path.parent.exists()
    assert client[:4] == b"mine"
    opened()


def test_a_lock_whose_file_was_removed_meanwhile_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = OwnerLock(tmp_path / "owner", "")
    real = fcntl.flock

    def slow(fd: int, operation: int) -> None:
        """The owner goes between another's opening and locking."""
        first.remove()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    second = OwnerLock(tmp_path / "owner", "")
    monkeypatch.undo()
    with pytest.raises(ConfigError):
        OwnerLock(tmp_path / "owner", "")
    second.release()


# ---- what the system is asked and told


@pytest.mark.parametrize(("text", "nodes"), [("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0,2-3,8\n", [0, 2, 3, 8])])
def test_numa_nodes_are_read_as_the_system_writes_them(tmp_path: Path, text: str, nodes: list[int]) -> None:
    (tmp_path / "sys/devices/system/node").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/online").write_text(text)
    assert system.online_nodes(tmp_path) == nodes
    assert system.online_nodes(tmp_path / "none") == []


def test_nodes_that_are_not_there_are_said_to_fail(tmp_path: Path) -> None:
    (tmp_path / "sys/devices/system/node").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/online").write_text("900-901\n")
    pages = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    assert "not spread over 2 NUMA nodes" in system.interleave(pages, tmp_path)


def test_an_older_kernel_touches_by_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_MADV_POPULATE_WRITE", 9999)
    pages = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    assert system.touch(pages) == ""


def group(root: Path, path: str, **files: object) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def machine(root: Path, cgroup: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    machine(tmp_path, "0::/pods/one\n")
    group(tmp_path, "pods/one", memory__max="max", memory__current=5, memory__stat="file 0\nshmem 0")
    group(tmp_path, "pods", memory__max=1 << 20, memory__current=1000, memory__stat="file 700\nshmem 300")
    assert room.memory_free(tmp_path) == ((1 << 20) - 1000 + 400, f"the memory limit of control group {tmp_path}/sys/fs/cgroup/pods")


def test_the_first_version_of_control_groups_is_read_too(tmp_path: Path) -> None:
    machine(tmp_path, "4:cpu,memory:/a\n3:blkio:/b\n")
    stat = "cache 1\ntotal_cache 600\ntotal_shmem 600"
    group(tmp_path, "memory/a", memory__limit_in_bytes=5000, memory__usage_in_bytes=4000, memory__stat=stat)
    group(tmp_path, "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=1, memory__stat=stat)
    assert room.memory_free(tmp_path)[0] == 1000


def test_without_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    assert room.memory_free(tmp_path) == (8000 * 1024, "the machine")
    (tmp_path / "proc/self/cgroup").unlink()
    assert room.memory_free(tmp_path) == (8000 * 1024, "the machine")
