"""The client's maps of the arena and its lock, on files of the right shape."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from kvstore.clients.arena import Arena, SessionLock, block_tensors
from kvstore.errors import FormatError, GeometryError, Unavailable
from kvstore.geometry import Geometry

HEADER_BYTES = 4096
ARENA_BYTES = 16 * 4096


@pytest.fixture
def arena_path(tmp_path: Path) -> Path:
    path = tmp_path / "arena"
    path.write_bytes(bytes(HEADER_BYTES) + bytes(range(256)) * (ARENA_BYTES // 256))
    return path


def locked(path: Path) -> bool:
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_an_absent_arena_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        Arena(str(tmp_path / "none"), HEADER_BYTES, ARENA_BYTES)


def test_a_short_arena_is_a_typed_error(arena_path: Path) -> None:
    os.truncate(arena_path, HEADER_BYTES + ARENA_BYTES - 1)
    with pytest.raises(FormatError, match="another daemon"):
        Arena(str(arena_path), HEADER_BYTES, ARENA_BYTES)


def test_views_begin_after_the_header_and_are_read_only(arena_path: Path) -> None:
    arena = Arena(str(arena_path), HEADER_BYTES, ARENA_BYTES)
    view = arena.view(1, 100)
    assert view.tolist() == list(range(100))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="cannot set"):
        view.flags.writeable = True


def test_what_a_writable_view_gets_is_read_through_the_other_map(arena_path: Path) -> None:
    arena = Arena(str(arena_path), HEADER_BYTES, ARENA_BYTES)
    arena.writable_view(3, 4096)[:] = 9
    assert (arena.view(3, 4096) == 9).all()
    assert arena.view(4, 4).tolist() == [0, 1, 2, 3]


def test_a_slot_past_the_end_is_refused(arena_path: Path) -> None:
    arena = Arena(str(arena_path), HEADER_BYTES, ARENA_BYTES)
    with pytest.raises(FormatError, match="past the arena"):
        arena.view(15, 4097)


def test_views_outlive_the_arena_object_and_the_file(arena_path: Path) -> None:
    view = Arena(str(arena_path), HEADER_BYTES, ARENA_BYTES).view(0, 16)
    arena_path.unlink()
    assert view.tolist() == list(range(16))


def test_a_forked_child_has_neither_the_maps_nor_the_lock(arena_path: Path, tmp_path: Path) -> None:
    session = tmp_path / "session"
    session.touch()
    arena, lock = Arena(str(arena_path), HEADER_BYTES, ARENA_BYTES), SessionLock(str(session))
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, b"y" if str(arena_path) in Path("/proc/self/maps").read_text() else b"n")
        signal.pause()
    try:
        assert os.read(told, 1) == b"n", "the child must not have the arena mapped"
        assert locked(session), "the child's end of the lock must not end the parent's"
        lock.release()
        assert not locked(session), "the child must not keep the lock"
        assert arena.view(0, 1)[0] == 0
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
        os.close(tell)


def test_the_lock_is_held_until_released(tmp_path: Path) -> None:
    path = tmp_path / "session"
    path.touch()
    lock = SessionLock(str(path))
    assert locked(path)
    with pytest.raises(Unavailable, match="locked"):
        SessionLock(str(path))
    lock.release()
    lock.release()
    assert not locked(path)


def test_a_missing_session_file_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="session file"):
        SessionLock(str(tmp_path / "none"))


def test_tensors_of_a_block_are_views_of_its_bytes() -> None:
    torch = pytest.importorskip("torch")
    geometry = Geometry("mha", 2, 2, 4, 4, "bfloat16", 8)
    block = np.zeros(geometry.slot_bytes, np.uint8)
    layers = block_tensors(block, geometry)
    assert [tuple(layer["k"].shape) for layer in layers] == [(2, 8, 4), (2, 8, 4)]
    layers[1]["v"].fill_(1.0)
    tail = torch.from_numpy(block[: geometry.block_bytes]).view(torch.bfloat16)
    assert (tail[-64:] == 1).all()
    assert (tail[:-64] == 0).all()


def test_tensors_of_a_read_only_block_come_without_a_copy_or_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    pytest.importorskip("torch")
    geometry = Geometry.mla(layers=1, latent_dim=4, rope_dim=2, dtype="float32", block_tokens=2)
    block = np.arange(geometry.block_bytes, dtype=np.uint8)
    block.flags.writeable = False
    (layer,) = block_tensors(block, geometry)
    assert layer["kv"].data_ptr() == block.ctypes.data
    assert not recwarn.list


def test_a_block_too_short_for_its_geometry_is_refused() -> None:
    pytest.importorskip("torch")
    geometry = Geometry("mha", 1, 1, 4, 4, "float32", 2)
    with pytest.raises(GeometryError, match="its geometry"):
        block_tensors(np.zeros(4, np.uint8), geometry)
