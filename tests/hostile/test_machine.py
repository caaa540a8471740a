"""The machine under a daemon gives out: shared memory that is full, or deleted, and no file descriptors left."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from kvstore import errors
from kvstore.clients import client as client_module
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain
from tests.cases.disks import tiny_disk
from tests.cases.figures import eventually, read, store, tier

TYPED = (errors.ResourceExhausted, errors.Unavailable, errors.SessionEnded)


def fill_up(directory: Path) -> Path:
    """Take what is left of a file system, to the last byte."""
    path = directory / "filler"
    with path.open("wb", buffering=0) as file:
        for size_bytes in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size_bytes)) == size_bytes:
                    pass
            except OSError:
                continue
    return path


def test_a_full_shared_memory_refuses_new_sessions_in_words_and_serves_the_old(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "shm", 16 << 20) as mounted:
        if not mounted:
            pytest.skip("needs the right to mount a file system")
        flags = ["--dram-dir", str(tmp_path / "shm")]
        with DaemonProcess(tmp_path / "d", flags, dram="8MiB", nvme=False) as daemon, KVClient(daemon.address) as old:
            namespace = old.open_namespace(IDENTITY, GEOMETRY)
            store(old, namespace, chain(1, 20))
            idle = KVClient(daemon.address)
            assert read(idle, idle.open_namespace(IDENTITY, GEOMETRY), chain(99, 1)) == 0  # attached, and holds nothing
            filler = fill_up(tmp_path / "shm")
            with KVClient(daemon.address) as new, pytest.raises(TYPED, match="No space"):
                store(new, new.open_namespace(IDENTITY, GEOMETRY), chain(2, 5))
            with pytest.raises(TYPED, match="No space"):
                store(idle, idle.open_namespace(IDENTITY, GEOMETRY), chain(3, 5))
            assert store(old, namespace, chain(4, 20)).stored == 20
            assert read(old, namespace, chain(1, 20)) == read(old, namespace, chain(4, 20)) == 20
            filler.unlink()
            for client in (KVClient(daemon.address), idle):
                with client:
                    assert store(client, client.open_namespace(IDENTITY, GEOMETRY), chain(5, 5)).stored == 5
            assert eventually(lambda: tier(old, "dram").held_bytes == 0)
            assert "Traceback" not in daemon.log()


def test_more_shared_memory_than_there_is_is_refused_in_words(tmp_path: Path) -> None:
    with tiny_disk(tmp_path / "shm", 4 << 20) as mounted:
        size = "8MiB" if mounted else "900TiB"
        daemon = DaemonProcess(tmp_path / "d", ["--dram-dir", str(tmp_path / "shm")], dram=size, nvme=False)
        with pytest.raises(RuntimeError, match=r"asked, .* has .* free; set --dram-bytes"):
            daemon.start()
        daemon.close()
        assert not list((tmp_path / "shm").rglob("arena*"))


def delete_arena(shared: Path) -> None:
    next(shared.rglob("arena")).unlink()


DELETIONS: dict[str, Callable[[Path], None]] = {
    "the arena": delete_arena,
    "its directory": lambda shared: shutil.rmtree(next(shared.iterdir())),
    "the sessions": lambda shared: shutil.rmtree(next(shared.rglob("sessions"))),
}


@pytest.mark.parametrize("deleted", DELETIONS)
def test_shared_memory_deleted_under_it_costs_nobody_a_wrong_byte(
    daemon: DaemonProcess, deleted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is attached goes on in place; who comes later gets its bytes over gRPC; health says so, and a restart mends it for all."""
    monkeypatch.setattr(client_module, "MAP_AGAIN_S", 2.0)
    with KVClient(daemon.address) as old, KVClient(daemon.address) as new:
        namespace = old.open_namespace(IDENTITY, GEOMETRY)
        store(old, namespace, chain(1, 20))
        with old.get(namespace, chain(1, 20)) as held:
            DELETIONS[deleted](daemon.shared)
            assert store(old, namespace, chain(2, 20)).stored == 20
            assert read(old, namespace, chain(1, 20)) == read(old, namespace, chain(2, 20)) == 20
            mine = new.open_namespace(IDENTITY, GEOMETRY)
            assert read(new, mine, chain(1, 20)) == 20
            assert store(new, mine, chain(3, 20)).stored == 20
            assert read(old, namespace, chain(3, 20)) == 20
            assert in_place(new, mine) == (deleted == "the sessions")
            assert held.blocks == 20
        if deleted != "the sessions":
            assert tier(old, "dram").health == "degraded"
            assert "deleted" in tier(old, "dram").health_reason
        assert eventually(lambda: tier(old, "nvme").blocks == 60)
        assert "Traceback" not in daemon.log()
        daemon.restart()
        assert tier(old, "dram").health == "ok"
        assert [read(old, namespace, chain(seed, 20)) for seed in (1, 2, 3)] == [20] * 3
        assert eventually(lambda: in_place(new, mine), 5.0), "it tries again by itself"


def in_place(client: KVClient, namespace: Namespace) -> bool:
    """Whether the client reads out of the arena itself."""
    with client.get(namespace, chain(1, 1)) as lease:
        return lease.attached is not None


def test_a_paged_cache_is_told_that_it_cannot_map(daemon: DaemonProcess) -> None:
    delete_arena(daemon.shared)
    with KVClient(daemon.address) as client, pytest.raises(errors.Unavailable, match="arena"):
        client.open_blocks(IDENTITY, GEOMETRY)


def test_without_file_descriptors_it_serves_whom_it_has(daemon: DaemonProcess) -> None:
    """Hundreds of connections that say nothing take every descriptor: who is attached notices nothing, who comes is told, and it passes."""
    with KVClient(daemon.address) as old:
        namespace = old.open_namespace(IDENTITY, GEOMETRY)
        store(old, namespace, chain(1, 20))
        used = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used + 30, used + 30))
        with ExitStack() as crowd:
            for _ in range(200):
                connection = crowd.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                connection.settimeout(0.2)
                try:
                    connection.connect(daemon.address)
                except OSError:
                    break
            assert store(old, namespace, chain(2, 20)).stored == 20
            assert read(old, namespace, chain(1, 20)) == 20
            assert not answers(daemon)
        assert eventually(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) < used + 20)
        assert eventually(lambda: answers(daemon), 10.0)
        with KVClient(daemon.address) as new:
            assert read(new, new.open_namespace(IDENTITY, GEOMETRY), chain(2, 20)) == 20
        assert "Traceback" not in daemon.log()


def answers(daemon: DaemonProcess) -> bool:
    """Whether it answers a call over a connection of its own."""
    with grpc.insecure_channel(f"unix:{daemon.address}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            return bool(KVStoreStub(channel).Stats(pb.StatsRequest(), timeout=1).epoch)
        except grpc.RpcError:
            return False
