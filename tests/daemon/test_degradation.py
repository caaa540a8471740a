"""A disk that fails, fills up, or stops answering: it shows in health, statistics, metrics and the log, and passes by itself."""

from __future__ import annotations

import os
import queue
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain
from tests.cases.disks import limit_files
from tests.cases.figures import all_on_disk, eventually, nothing_held, opaque, read, store, tier
from tests.daemon.faulty import FaultyDaemon

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
WAIT_S = 0.6  # seconds that anybody waits for a block here
NOT_LONG_S = 9.0  # seconds: more than the machine stands still, and less than a call may take
STOPPED_S = 20.0  # seconds: with time for a machine that stands still, and less than DaemonProcess waits before it kills
BACK_S = 12.0  # seconds until a disk that is well again shows as well: some of quiet, a probe, a look
# Everything as in earnest, in a third of the time: second tries, a probe when for longer than that nothing has failed, looks.
HURRY = ",".join(
    (
        "kvstore.cache.completions.WRITE_PAUSE_S=0.3",
        "kvstore.tiers.health.STANDS_S=0.8",
        "kvstore.tiers.nvme.PROBE_QUIET_S=0.9",
        "kvstore.daemon.server.BEAT_TICKS=2",
        "kvstore.daemon.server.STOP_SLACK_S=4",
        "kvstore.daemon.server.LAST_S=1",
    )
)


@pytest.fixture
def sick(tmp_path: Path) -> Iterator[FaultyDaemon]:
    """A daemon whose disk does as it is told."""
    with FaultyDaemon(tmp_path, ["--acquire-timeout-s", str(WAIT_S), "--shutdown-s", "1"], constants=HURRY) as process:
        yield process


@pytest.fixture
def client(sick: FaultyDaemon) -> Iterator[KVClient]:
    with KVClient(sick.address) as made:
        yield made


def health(daemon: DaemonProcess, service: str) -> int:
    """As grpc's own health service answers."""
    with grpc.insecure_channel(f"unix:{daemon.address}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status)


def metric(daemon: DaemonProcess, name: str) -> float:
    """0 where there is no such metric."""
    with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def shows_as(daemon: DaemonProcess, client: KVClient, state: str, within_s: float = 5.0) -> bool:
    """Whether statistics, metrics and health come to agree that the disk is so; the store as a whole serves all the while."""
    served = SERVING if state == "ok" else NOT_SERVING
    gauge = f'kvstore_tier_health{{state="{state}",tier="nvme"}}'

    def agrees() -> bool:
        assert health(daemon, "") == health(daemon, "kvstore.v1.KVStore") == health(daemon, "kvstore.tier.dram") == SERVING
        return tier(client, "nvme").health == state and health(daemon, "kvstore.tier.nvme") == served and metric(daemon, gauge) == 1

    return eventually(agrees, within_s)


def on_disk_only(client: KVClient, namespace: Namespace, daemon: DaemonProcess, hashes: bytes) -> None:
    store(client, namespace, hashes)
    assert all_on_disk(client, len(hashes) // 32)
    daemon.restart(kill=False)


def test_reads_that_fail_are_misses_and_show(sick: FaultyDaemon, client: KVClient) -> None:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    on_disk_only(client, namespace, sick, chain(1, 20))
    sick.fault("EIO", "read")
    assert read(client, namespace, chain(1, 20)) == 0
    assert shows_as(sick, client, "degraded")
    assert "Input/output error" in tier(client, "nvme").health_reason
    assert "check the disk" in tier(client, "nvme").health_reason
    assert metric(sick, 'kvstore_transfers_total{kind="read",result="failed"}') >= 1
    assert metric(sick, 'kvstore_cache_events_total{event="unreadable_blocks"}') >= 1
    assert "nvme is degraded: " in sick.log()
    assert store(client, namespace, chain(2, 20)).stored == 20
    assert read(client, namespace, chain(2, 20)) == 20, "memory serves as ever"
    time.sleep(1.8)
    assert shows_as(sick, client, "degraded"), "the probe fails too"
    sick.heal()
    assert shows_as(sick, client, "ok", BACK_S), "and nobody has read anything meanwhile"
    assert "nvme: well again after" in sick.log()
    assert sick.log().count("nvme is degraded: ") == 1


@pytest.mark.parametrize(
    ("what", "call", "text"),
    [("EIO", "write", "Input/output error"), ("ENOSPC", "write", "free some room"), ("EROFS", "record", "Read-only")],
)
def test_writes_that_fail_show_and_are_made_up_for(sick: FaultyDaemon, client: KVClient, what: str, call: str, text: str) -> None:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    store(client, namespace, chain(1, 20))
    assert all_on_disk(client, 20)
    sick.fault(what, call)
    assert store(client, namespace, chain(2, 20)).stored == 20, "nobody who stores is made to wait, or refused"
    assert shows_as(sick, client, "degraded")
    assert text in tier(client, "nvme").health_reason
    assert tier(client, "nvme").blocks == 20, "nothing that was not stored is reported stored"
    assert client.lookup(namespace, chain(2, 20)).tiers == ("dram",) * 20
    assert metric(sick, 'kvstore_cache_events_total{event="failed_writes"}') >= 1
    time.sleep(1.3)
    assert shows_as(sick, client, "degraded"), "as long as it lasts"
    sick.heal()
    assert all_on_disk(client, 40)
    assert shows_as(sick, client, "ok", BACK_S)
    sick.restart()
    assert read(client, namespace, chain(1, 20)) == read(client, namespace, chain(2, 20)) == 20


def test_a_fault_whose_work_is_gone_passes_by_a_probe(sick: FaultyDaemon, client: KVClient) -> None:
    """The block that could not be written is cleared meanwhile: nothing of the daemon's own work would try the disk again."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    sick.fault("EIO", "write")
    store(client, namespace, chain(1, 3))
    assert shows_as(sick, client, "degraded")
    client.clear(namespace)
    sick.heal()
    assert shows_as(sick, client, "ok", BACK_S)
    assert tier(client, "nvme").blocks == 0


@pytest.mark.parametrize("calls", [("read", "write"), ("sync",)], ids="+".join)
def test_a_stuck_disk_does_not_keep_the_daemon_from_stopping(sick: FaultyDaemon, client: KVClient, calls: tuple[str, ...]) -> None:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    on_disk_only(client, namespace, sick, chain(1, 4))
    sick.fault("stuck", *calls)
    assert read(client, namespace, chain(1, 4)) == (0 if "read" in calls else 4)
    started_at = time.monotonic()
    sick.stop()
    assert time.monotonic() - started_at < STOPPED_S
    sick.heal()
    sick.start()
    assert read(client, namespace, chain(1, 4)) == 4


def test_a_disk_that_does_not_answer_keeps_nobody_waiting_for_a_new_model(sick: FaultyDaemon, client: KVClient) -> None:
    """Nor the daemon from stopping: a thread of it hangs in the system, as here in a pipe that nobody reads."""
    client.open_namespace(IDENTITY, opaque(4_000))
    os.mkfifo(sick.data / "namespaces.json.new")
    started_at = time.monotonic()
    namespace = client.open_namespace(IDENTITY, opaque(5_000))
    assert 1 < time.monotonic() - started_at < NOT_LONG_S
    assert store(client, namespace, chain(1, 5)).stored == 5
    assert read(client, namespace, chain(1, 5)) == 5
    assert "is not remembered, its blocks stay in memory: no answer" in sick.log()
    started_at = time.monotonic()
    sick.stop()
    assert time.monotonic() - started_at < STOPPED_S


def test_a_disk_that_refuses_a_new_model_keeps_nobody_waiting(sick: FaultyDaemon, client: KVClient) -> None:
    """A namespace is used from memory until the disk has taken it; then its blocks go down like any others."""
    sick.fault("EIO", "sync", "write", "record")
    (sick.data / "namespaces.json.new").mkdir()  # so that it cannot be replaced
    started_at = time.monotonic()
    namespace = client.open_namespace(IDENTITY, opaque(5_000))
    assert time.monotonic() - started_at < NOT_LONG_S
    assert store(client, namespace, chain(1, 5)).stored == 5
    assert shows_as(sick, client, "degraded")
    (sick.data / "namespaces.json.new").rmdir()
    sick.heal()
    assert all_on_disk(client, 5)
    assert shows_as(sick, client, "ok", BACK_S)


def test_a_real_limit_on_files_shows_and_passes(daemon: DaemonProcess) -> None:
    """The same with no pretence: the system itself refuses to write past a place in the file."""
    with KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        limit_files(daemon.pid, 10 * GEOMETRY.slot_bytes)
        store(client, namespace, chain(1, 30))
        assert shows_as(daemon, client, "degraded")
        assert "File too large" in tier(client, "nvme").health_reason
        limit_files(daemon.pid, None)
        assert all_on_disk(client, 30)
        assert shows_as(daemon, client, "ok", BACK_S)


def test_a_directory_deleted_under_the_daemon_shows_and_takes_no_more_blocks(daemon: DaemonProcess) -> None:
    """What lies in files without a name is served as before, and gone with the daemon: nothing more may be reported stored there."""
    with KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, namespace, chain(1, 20))
        assert all_on_disk(client, 20)
        shutil.rmtree(daemon.data)
        assert shows_as(daemon, client, "degraded")
        assert "deleted under the daemon" in tier(client, "nvme").health_reason
        assert store(client, namespace, chain(2, 20)).stored == 20, "memory serves as ever"
        assert eventually(lambda: metric(daemon, 'kvstore_cache_events_total{event="failed_writes"}') >= 1)
        assert client.lookup(namespace, chain(2, 20)).tiers == ("dram",) * 20
        assert tier(client, "nvme").blocks == 20
        assert daemon.log().count("nvme is degraded: ") == 1
        daemon.restart()
        assert read(client, namespace, chain(1, 20)) == 0
        assert store(client, namespace, chain(1, 20)).stored == 20
        assert all_on_disk(client, 20)
        assert tier(client, "nvme").health == "ok"


def test_a_sender_that_stops_gives_its_slot_back(tmp_path: Path) -> None:
    """A Write in pieces, the next of which never comes: it ends by a deadline, and its key is free."""
    with FaultyDaemon(tmp_path, constants="kvstore.daemon.byte_calls.PIECE_TIMEOUT_S=0.5") as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        pieces: queue.SimpleQueue[pb.BlockBytes | None] = queue.SimpleQueue()
        pieces.put(pb.BlockBytes(namespace_id=namespace.id, epoch=namespace.epoch, hash=chain(1, 1), parent=bytes(32), data=bytes(100)))
        with grpc.insecure_channel(f"unix:{daemon.address}") as channel:
            with pytest.raises(grpc.RpcError, match="no piece came"):
                KVStoreStub(channel).Write(iter(pieces.get, None), timeout=10)
            pieces.put(None)
        assert nothing_held(client, 3.0)
        assert store(client, namespace, chain(1, 1)).stored == 1


def test_a_reader_that_stops_gives_its_leases_back(tmp_path: Path) -> None:
    """A Read whose answer nobody takes: more than any buffer on the way holds."""
    large = opaque(1 << 20)
    constants = "kvstore.daemon.byte_calls.PIECE_TIMEOUT_S=0.5"
    with FaultyDaemon(tmp_path, constants=constants, nvme=False) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, large)
        store(client, namespace, chain(1, 40))
        request = pb.ReadRequest(namespace_id=namespace.id, epoch=namespace.epoch, hashes=chain(1, 40), timeout_s=1)
        with grpc.insecure_channel(f"unix:{daemon.address}") as channel:
            stream = KVStoreStub(channel).Read(request, timeout=20)
            assert next(iter(stream)).data
            assert nothing_held(client, 5.0)
            with pytest.raises(grpc.RpcError, match="the client has not read"):
                for _ in stream:
                    pass
