"""The daemon's life: where it listens, what it says when it cannot start, health, reflection, metrics, logs, the orderly stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, pattern
from tests.cases.figures import eventually
from tests.daemon.faulty import FaultyDaemon

pytestmark = pytest.mark.usefixtures("daemons_by_command")
SERVE = [sys.executable, "-c", "from kvstore.cli.main import main; raise SystemExit(main())", "serve"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), ["--log-format", "json", "--tcp", "127.0.0.1:0"]) as process:
        yield process


def store(daemon: DaemonProcess, hashes: bytes) -> None:
    with KVClient(daemon.address) as client, client.put(client.open_namespace(IDENTITY, GEOMETRY), hashes) as put:
        for block in put.blocks:
            block.write(pattern(block.hash))
    assert put.stored == len(hashes) // 32


def refused(*flags: str) -> str:
    """What a daemon says that must not start."""
    done = subprocess.run([*SERVE, "--metrics", "", *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_the_readiness_line_names_socket_and_sizes(daemon: DaemonProcess) -> None:
    expected = rf"kvstore ready on {daemon.address} \(dram 64.0 MiB, nvme 64.0 MiB, metrics 127.0.0.1:\d+\)"
    assert re.fullmatch(expected, daemon.ready)


def test_the_socket_is_for_the_group_and_nobody_else(daemon: DaemonProcess) -> None:
    assert os.stat(daemon.address).st_mode & 0o777 == 0o660


def test_a_missing_socket_directory_is_made_closed_to_others(tmp_path: Path) -> None:
    place = tmp_path / "run" / "s.sock"
    with DaemonProcess(tmp_path / "d", ["--listen", str(place)]) as daemon:
        assert place.parent.stat().st_mode & 0o777 == 0o750
        assert str(place) in daemon.ready


def test_a_live_daemons_socket_is_not_taken(daemon: DaemonProcess) -> None:
    says = refused("--listen", daemon.address, "--dram", "4MiB", "--dram-dir", str(daemon.shared))
    assert f"listen: {daemon.address}: in use by another process (pid {daemon.pid}); stop it, or give this one another --listen" in says
    with KVClient(daemon.address) as client:
        assert client.stats().uptime_s > 0


def test_of_daemons_started_together_one_serves_and_the_other_says_why_not(tmp_path: Path) -> None:
    place = tmp_path / "s"
    both: list[subprocess.Popen[str]] = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            flags = ["--listen", str(place), "--metrics", "", "--dram", "4MiB", "--dram-dir", str(tmp_path / name)]
            both.append(subprocess.Popen([*SERVE, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        lines = [process.stdout.readline() for process in both if process.stdout]
        assert sorted(line[:13] for line in lines) == ["", "kvstore ready"]
        refusal = both[lines.index("")].communicate(timeout=30)[1]
        assert f"listen: {place}: in use by another process" in refusal
        with KVClient(str(place)) as client:
            assert client.stats().uptime_s > 0
        winner = both[1 - lines.index("")]
        winner.terminate()
        assert winner.wait(30) == 0
        assert [path.name for path in tmp_path.glob("s*")] == []
    finally:
        for process in both:
            process.kill()
            process.communicate()


def test_a_dead_daemons_socket_is_replaced(daemon: DaemonProcess) -> None:
    daemon.kill9()
    assert Path(daemon.address).is_socket()
    daemon.start()
    with KVClient(daemon.address) as client:
        assert client.stats().uptime_s > 0


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "precious"
    place.write_text("keep me")
    assert "is no socket" in refused("--listen", str(place))
    assert place.read_text() == "keep me"


def test_more_memory_than_there_is_says_what_was_asked_what_is_there_and_what_to_do(tmp_path: Path) -> None:
    says = refused("--listen", str(tmp_path / "s"), "--dram", "900TiB")
    assert "900.0 TiB asked" in says
    assert "free" in says
    assert "--dram" in says
    assert not (tmp_path / "s").exists()


def test_more_disk_than_there_is_says_so(tmp_path: Path) -> None:
    says = refused("--listen", str(tmp_path / "s"), "--dram", "4MiB", "--nvme", str(tmp_path / "n"), "--nvme-bytes", "900TiB")
    assert "900.0 TiB asked" in says
    assert "--nvme" in says


def test_a_disk_directory_in_use_is_refused(daemon: DaemonProcess, tmp_path: Path) -> None:
    says = refused("--listen", str(tmp_path / "s"), "--dram", "4MiB", "--dram-dir", str(tmp_path), "--nvme", str(daemon.data))
    assert "in use" in says or "another" in says


def test_a_metrics_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ["--listen", str(tmp_path / "s"), "--dram", "4MiB", "--dram-dir", str(tmp_path), "--metrics", f"127.0.0.1:{port}"]
        assert "--metrics" in refused(*flags)


def test_health_is_served_overall_and_per_tier(shared: DaemonProcess) -> None:
    with grpc.insecure_channel(f"unix:{shared.address}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvstore.v1.KVStore", "kvstore.tier.dram", "kvstore.tier.nvme"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING, service


def test_a_disk_that_fails_shows_in_health_metrics_and_stats(tmp_path: Path) -> None:
    hashes = chain(1, 4)
    with FaultyDaemon(tmp_path) as daemon:
        store(daemon, hashes)
        daemon.restart(kill=False)
        daemon.fault("EIO", "read")  # for good: what passes by itself may have passed before one looks
        _shows_sick(daemon, hashes)


def _shows_sick(daemon: DaemonProcess, hashes: bytes) -> None:
    with KVClient(daemon.address) as client, grpc.insecure_channel(f"unix:{daemon.address}") as channel:
        with client.get(client.open_namespace(IDENTITY, GEOMETRY), hashes) as lease:
            assert lease.blocks == 0, "a miss, and the daemon lives"
        health: Any = health_pb2_grpc.HealthStub(channel)
        check = health_pb2.HealthCheckRequest(service="kvstore.tier.nvme")
        assert eventually(lambda: health.Check(check, timeout=5).status == health_pb2.HealthCheckResponse.NOT_SERVING)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == health_pb2.HealthCheckResponse.SERVING
        nvme = next(tier for tier in client.stats().tiers if tier.tier == "nvme")
        assert nvme.health == "degraded"
        assert nvme.health_reason
    found = metrics(daemon)
    assert found['kvstore_tier_health{state="degraded",tier="nvme"}'] == 1
    assert found['kvstore_transfers_total{kind="read",result="failed"}'] >= 1


def test_reflection_lists_the_service(shared: DaemonProcess) -> None:
    with grpc.insecure_channel(f"unix:{shared.address}") as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        (reply,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)
        names = {service.name for service in reply.list_services_response.service}
        assert "kvstore.v1.KVStore" in names
        assert "grpc.health.v1.Health" in names


def metrics(daemon: DaemonProcess) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=5).read().decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_metrics_cover_tiers_calls_outcomes_and_sessions(daemon: DaemonProcess) -> None:
    store(daemon, chain(1, 3))
    with KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        with client.get(namespace, chain(1, 3) + chain(9, 2)):
            found = metrics(daemon)
    assert found['kvstore_operations_total{operation="acquire",outcome="block_hit"}'] == 3
    assert found['kvstore_operations_total{operation="acquire",outcome="block_miss"}'] == 2
    assert found['kvstore_tier_bytes{class="live",tier="dram"}'] == 3 * GEOMETRY.slot_bytes
    assert found['kvstore_tier_held_bytes{tier="dram"}'] == 3 * GEOMETRY.slot_bytes
    assert found['kvstore_tier_health{state="ok",tier="nvme"}'] == 1
    assert found['kvstore_operations_total{operation="commit",outcome="stored"}'] == 3
    assert found['kvstore_rpc_seconds_count{code="OK",method="OpenNamespace"}'] == 2
    assert found['kvstore_sessions{state="attached"}'] == 1
    assert found['kvstore_cache_events_total{event="committed"}'] == 3
    by_class = sum(value for name, value in found.items() if name.startswith("kvstore_tier_bytes") and 'tier="dram"' in name)
    assert by_class == found['kvstore_tier_capacity_bytes{tier="dram"}']


def test_failed_calls_are_counted_with_their_status(daemon: DaemonProcess) -> None:
    with KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        namespace.opened = (namespace.epoch, 999)
        with pytest.raises(Exception, match="not open"):
            client.lookup(namespace, chain(1, 1))
    assert metrics(daemon)['kvstore_rpc_seconds_count{code="NOT_FOUND",method="Lookup"}'] == 1


def test_json_logs_are_one_object_a_line_with_keys(shared: DaemonProcess) -> None:
    store(shared, chain(2, 1))
    lines = [json.loads(line) for line in shared.log().splitlines()]
    attached = next(line for line in lines if line["text"].endswith("attached"))
    assert attached["level"] == "info"
    assert attached["client"]
    assert attached["tenant"] == "default"
    assert {"time", "logger"} <= set(attached)


def test_an_orderly_stop_finishes_writes_and_marks_the_disk_clean(daemon: DaemonProcess) -> None:
    hashes = chain(3, 200)
    store(daemon, hashes)
    assert daemon.stop() == 0
    assert (daemon.data / "clean.json").exists()
    assert not Path(daemon.address).exists()
    daemon.start()
    assert "clean_stop=True" in daemon.log()
    with KVClient(daemon.address) as client:
        assert client.lookup(client.open_namespace(IDENTITY, GEOMETRY), hashes).blocks == 200


def test_a_stop_with_nothing_attached_gives_the_memory_back(daemon: DaemonProcess) -> None:
    store(daemon, chain(4, 2))
    daemon.stop()
    assert not list(daemon.shared.rglob("arena"))


def test_a_stop_does_not_wait_longer_than_it_was_told(tmp_path: Path) -> None:
    flags = ["--shutdown-s", "1", "--nvme-write-bytes-per-s", "1MiB"]
    with DaemonProcess(tmp_path, flags) as daemon:
        store(daemon, chain(5, 1000))
        started_at = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - started_at < 12, "all of it would take sixteen seconds"


def test_sigint_stops_in_order_too(daemon: DaemonProcess) -> None:
    assert daemon.stop(signal.SIGINT) == 0


def test_the_daemon_imports_neither_torch_nor_the_worker() -> None:
    code = "import sys, kvstore.daemon.server, kvstore.clients.client; print({'torch', 'transformers', 'cupy'} & set(sys.modules) or [])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
