"""Cases 1 to 4: what a restart must find on disk, and what it must not make of what somebody did to the files."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash
from tests.cases.children import Child
from tests.cases.figures import all_on_disk, eventually, opaque, present, read, settled, store, store_each, tier

SLOT_BYTES = GEOMETRY.slot_bytes


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_every_block_on_disk_outlives_the_daemon(daemon: DaemonProcess, client: KVClient, kill: bool) -> None:
    """Case 1: N blocks of several namespaces and sizes, twice restarted: N hits, bytes equal, usage not doubled."""
    namespaces = [client.open_namespace(IDENTITY, geometry) for geometry in (GEOMETRY, opaque(5_000), opaque(70_000))]
    for seed, namespace in enumerate(namespaces):
        store(client, namespace, chain(seed, 50))
    assert all_on_disk(client, 150)
    used = dict(tier(client, "nvme").class_bytes)
    for _ in range(2):
        daemon.restart(kill=kill)
        assert [client.lookup(namespace, chain(seed, 50)).blocks for seed, namespace in enumerate(namespaces)] == [50] * 3
        assert [read(client, namespace, chain(seed, 50)) for seed, namespace in enumerate(namespaces)] == [50] * 3
        assert dict(tier(client, "nvme").class_bytes) == used


def test_blocks_stored_again_after_a_restart_take_no_room(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 1: what is on disk already is recognised, not written a second time."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    store(client, namespace, chain(1, 100))
    assert all_on_disk(client, 100)
    daemon.restart()
    again = store(client, namespace, chain(1, 120))
    assert again.names == ("exists",) * 100 + ("stored",) * 20
    assert all_on_disk(client, 120)
    assert tier(client, "nvme").class_bytes["live"] == 120 * SLOT_BYTES


@pytest.mark.parametrize("seed", range(3))
def test_killed_while_writing_it_loses_only_what_was_not_down(daemon: DaemonProcess, client: KVClient, seed: int) -> None:
    """Case 1: `kill -9` at any moment of a burst of writes: what counted as on disk is there, and nothing is wrong."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    store(client, namespace, chain(1, 40))
    assert all_on_disk(client, 40)
    with Child(daemon.address) as child:
        child.ask("lookup", 2, 1)
        child.say("work", seed, 30, 60.0)
        time.sleep(random.Random(seed).uniform(0.02, 0.3))
        daemon.kill9()
    daemon.start()
    assert read(client, namespace, chain(1, 40)) == 40
    for other in range(30):
        assert read(client, namespace, chain(other, 12)) <= 12
    used = tier(client, "nvme")
    assert used.class_bytes["live"] == used.blocks * SLOT_BYTES


def test_usage_is_right_before_the_first_request(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 2: the first thing that the new process says of itself is true, in statistics and in metrics."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    store_each(client, namespace, chain(1, 200))
    assert all_on_disk(client, 200)
    used = tier(client, "nvme")
    daemon.restart()
    with urllib.request.urlopen(f"http://{daemon.metrics_address}/metrics", timeout=10) as reply:
        shown = dict(line.rsplit(" ", 1) for line in reply.read().decode().splitlines())
    assert float(shown['kvstore_tier_bytes{class="live",tier="nvme"}']) == 200 * SLOT_BYTES
    with KVClient(daemon.address) as fresh:
        now = tier(fresh, "nvme")
    assert (now.blocks, dict(now.class_bytes)) == (used.blocks, dict(used.class_bytes))


def test_a_restarted_daemon_evicts_in_time(tmp_path: Path) -> None:
    """Case 2: a disk that was full before the restart stays within its size, and takes new blocks at once."""
    with DaemonProcess(tmp_path, dram="8MiB", nvme_bytes="8MiB") as small, KVClient(small.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store_each(client, namespace, chain(1, 550))
        assert settled(client)
        small.restart()
        full = tier(client, "nvme").blocks
        assert full > 400
        assert store_each(client, namespace, chain(2, 550)) == 550
        assert read(client, namespace, each_hash(chain(2, 550))[-1]) == 1
        now = tier(client, "nvme")
        assert sum(now.class_bytes.values()) == now.capacity_bytes == 8 << 20
        assert sum(file.stat().st_blocks * 512 for file in small.data.iterdir()) < 9 << 20


def truncate(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share) // 4096 * 4096)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "part of the data cut": lambda data: truncate(data / "data", 0.02),  # of 64 MiB, of which the first 2.4 are used
    "all of the data cut": lambda data: truncate(data / "data", 0.0),
    "part of the records cut": lambda data: truncate(data / "records", 0.005),  # of 2.1 MB, of which the first 20 KB are used
    "data deleted": lambda data: (data / "data").unlink(),
    "records deleted": lambda data: (data / "records").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_destroyed_under_it_costs_only_blocks(daemon: DaemonProcess, client: KVClient, damage: str) -> None:
    """Case 3: a miss from the lost block on, the process lives, the index heals; and so after a restart on what is left."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    hashes = chain(1, 150)
    store(client, namespace, hashes)
    assert all_on_disk(client, 150)
    daemon.restart(kill=False)  # now they are on disk only
    DAMAGE[damage](daemon.data)
    left = read(client, namespace, hashes)
    assert (left < 150) == ("data cut" in damage)
    assert settled(client)  # blocks behind the first lost one were on their way too
    assert client.lookup(namespace, hashes).blocks == left
    assert eventually(lambda: store(client, namespace, hashes).stored == 150 == read(client, namespace, hashes))
    assert all_on_disk(client, 150)
    daemon.restart()
    left = read(client, namespace, hashes)
    assert (left == 150) == ("data cut" in damage)
    assert eventually(lambda: store(client, namespace, hashes).stored == 150 == read(client, namespace, hashes))
    assert all_on_disk(client, 150)
    daemon.restart()
    assert read(client, namespace, hashes) == 150


def test_a_hole_in_the_middle_shortens_the_prefix(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 3: only what follows the lost block is unreachable; the blocks after it are found again once it is back."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    hashes = chain(1, 90)
    store(client, namespace, hashes)
    assert all_on_disk(client, 90)
    daemon.restart(kill=False)
    with (daemon.data / "data").open("r+b") as file:
        os.pwrite(file.fileno(), bytes(SLOT_BYTES), 40 * SLOT_BYTES)
    lost = read(client, namespace, hashes)
    assert 0 < lost < 90
    assert present(client, namespace, hashes).count(False) == 1
    assert store(client, namespace, each_hash(hashes)[lost], each_hash(hashes)[lost - 1]).stored == 1
    assert read(client, namespace, hashes) == 90


def test_another_format_is_refused_in_words(daemon: DaemonProcess, client: KVClient) -> None:
    """Case 4: data of another version is never silently dead: the message names the command that clears it, and it works."""
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    store(client, namespace, chain(1, 10))
    assert all_on_disk(client, 10)
    daemon.stop()
    path = daemon.data / "format.json"
    for version in (0, 2, "1", None):
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": version}))
        with pytest.raises(RuntimeError, match=f"run: kvstore fsck --clear {daemon.data}"):
            daemon.start()
    assert (daemon.data / "data").stat().st_size == 64 << 20
    command = [sys.executable, "-c", "from kvstore.cli.main import main; raise SystemExit(main())", "fsck", "--clear", str(daemon.data)]
    subprocess.run(command, check=True, timeout=60)
    assert not (daemon.data / "data").exists()
    daemon.start()
    assert client.lookup(namespace, chain(1, 10)).blocks == 0
    assert store(client, namespace, chain(1, 10)).stored == 10
