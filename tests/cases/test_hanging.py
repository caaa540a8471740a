"""Cases 35 to 37 and 39: whoever waits is told, in time, whatever hangs. (38 is about a remote tier, which is yet to come.)"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.aio import AsyncKVClient
from kvstore.clients.answers import Answer
from kvstore.clients.blocks import Slots
from kvstore.clients.client import KVClient
from kvstore.clients.steps import packed_checksum
from kvstore.proto import kvstore_pb2 as pb
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern
from tests.cases.children import ROOT, Child
from tests.cases.figures import all_on_disk, eventually, nothing_held, read, store, tier
from tests.cases.raw import Raw
from tests.daemon.faulty import FaultyDaemon

WAITING = 500  # requests at once
QUICK_S = 0.001  # seconds that a call may keep a scheduler's thread
WAIT_S = 0.6  # seconds that anybody waits for a block over a disk that hangs here
NOT_LONG_S = 5.0  # seconds: more than the machine stands still, and less than any deadline that is not set here

# A client that sends half a block over gRPC, says so, and never sends the rest.
HALF_A_BLOCK = """
import sys, time, grpc
from kvstore.clients.blocks import Slots
from kvstore.clients.client import KVClient
from kvstore.clients.steps import packed_checksum
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub
from tests.blocks import GEOMETRY, IDENTITY, chain
namespace = KVClient(sys.argv[1]).open_namespace(IDENTITY, GEOMETRY)
def pieces():
    yield pb.BlockBytes(namespace_id=namespace.id, epoch=namespace.epoch, hash=chain(7, 1), parent=bytes(32), data=bytes(8192))
    print("half", flush=True)
    time.sleep(600)
KVStoreStub(grpc.insecure_channel("unix:" + sys.argv[1])).Write(pieces())
"""


# ---- 35


def test_the_epoch_is_in_every_reply(daemon: DaemonProcess) -> None:
    """Case 35: whatever a client hears first after a restart tells it; what it says with an old epoch is refused in words."""
    seen = []
    for _ in range(2):
        with Raw(daemon.address) as raw:
            epochs = replies(raw)
            assert len(set(epochs)) == 1
            assert epochs[0]
            seen.append(epochs[0])
        daemon.restart()
    assert seen[0] != seen[1]


def replies(raw: Raw) -> list[str]:
    """The epochs in an answer of every call."""
    stub, namespace = raw.stub, raw.open()
    epoch, hashes = raw.attached.session.epoch, chain(1, 1)
    data = pattern(hashes).tobytes()
    whole = pb.BlockBytes(namespace_id=namespace, epoch=epoch, hash=hashes, parent=bytes(32), data=data, last=True)
    opened = stub.OpenNamespace(requests.open_namespace(IDENTITY, GEOMETRY, "", "", requests.KEEP_ALL))
    whole.checksum = packed_checksum(opened.digest, hashes, data)
    found = [opened.epoch, stub.Write(iter([whole])).epoch]
    found += [piece.epoch for piece in stub.Read(pb.ReadRequest(namespace_id=namespace, epoch=epoch, hashes=hashes, timeout_s=1))]
    join = pb.JoinGroupRequest(session=raw.attached.session.id, group="g", namespace_ids=[namespace], epoch=epoch)
    found.append(stub.JoinGroup(join).epoch)
    found.append(stub.Lookup(pb.LookupRequest(namespace_id=namespace, epoch=epoch, hashes=hashes)).epoch)
    found.append(stub.Prefetch(pb.PrefetchRequest(namespace_id=namespace, epoch=epoch, hashes=hashes)).epoch)
    found += [call(pb.PinRequest(namespace_id=namespace, epoch=epoch, hashes=hashes)).epoch for call in (stub.Pin, stub.Unpin)]
    watch = stub.Watch(pb.WatchRequest(namespace_id=namespace, epoch=epoch))
    found.append(next(watch).epoch)
    watch.cancel()
    found.append(stub.Clear(pb.ClearRequest(namespace_id=namespace, epoch=epoch)).epoch)
    found.append(stub.Stats(pb.StatsRequest()).epoch)
    return [*found, epoch]


def test_an_idle_engine_notices_a_restart_by_itself(daemon: DaemonProcess) -> None:
    """Case 35: with nothing to say, it knows within a second that what it holds is gone; its next call works with the new daemon."""
    with KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, namespace, chain(1, 4))
        with client.get(namespace, chain(1, 4)) as lease:
            daemon.restart()
            assert eventually(lambda: ended(lease.check), 3.0)
        old = namespace.epoch
        assert store(client, namespace, chain(2, 4)).stored == 4
        assert namespace.epoch != old


def ended(check: Callable[[], None]) -> bool:
    """Whether it raises that a session is over."""
    try:
        check()
    except (errors.SessionEnded, errors.StaleEpoch):
        return True
    return False


# ---- 36


def test_clients_killed_in_the_middle_of_a_push_hang_nobody(shared: DaemonProcess, guest: KVClient) -> None:
    """Case 36: what they held is free soon, in place or over gRPC; others notice nothing, all the while."""
    namespace = guest.open_namespace(IDENTITY, GEOMETRY)
    slowest_s = 0.0
    for seed in range(3):
        with Child(shared.address) as one, Child(shared.address) as two:
            assert one.ask("reserve", 200 + seed, 50) == ["slot"] * 50
            two.ask("lookup", 1, 1)
            two.say("work", seed, 30, 60.0)
            time.sleep(0.1)
            for child in (one, two):
                child.kill()
                started_at = time.monotonic()
                assert store(guest, namespace, chain(100 + seed, 4)).stored == 4
                assert read(guest, namespace, chain(100 + seed, 4)) == 4
                slowest_s = max(slowest_s, time.monotonic() - started_at)
        assert nothing_held(guest, 5.0)  # the disk takes its time too
    assert slowest_s < NOT_LONG_S


def test_a_sender_killed_in_the_middle_of_a_block_frees_its_slot(shared: DaemonProcess, guest: KVClient) -> None:
    """Case 36: the same for one that cannot map the arena."""
    command = [sys.executable, "-c", HALF_A_BLOCK, shared.address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline() == "half\n"
        assert eventually(lambda: tier(guest, "dram").class_bytes["reserved"] == GEOMETRY.slot_bytes)
        sender.kill()
    assert nothing_held(guest, 3.0)
    assert store(guest, guest.open_namespace(IDENTITY, GEOMETRY), chain(7, 1)).names == ("stored",)


# ---- 37


def test_a_disk_that_never_answers_costs_a_deadline_and_a_miss(tmp_path: Path) -> None:
    """Case 37: and it shows; the late bytes come into nobody else's slot; when it answers again everything is as it was."""
    with FaultyDaemon(tmp_path, ["--acquire-timeout-s", str(WAIT_S)]) as sick, KVClient(sick.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, namespace, chain(1, 20))
        assert all_on_disk(client, 20)
        sick.restart(kill=False)
        sick.fault("stuck", "read")
        for _ in range(3):
            started_at = time.monotonic()
            assert read(client, namespace, chain(1, 20)) == 0
            assert WAIT_S / 2 < time.monotonic() - started_at < NOT_LONG_S
        assert eventually(lambda: "under way" in tier(client, "nvme").health_reason)
        assert tier(client, "nvme").health == "degraded"
        assert client.stats().counters["acquire_deadlines"] >= 3
        for seed in range(2, 230):  # more than memory has: the slots that wait for the disk are nobody else's
            assert store(client, namespace, chain(seed, 20)).stored == 20
        assert tier(client, "dram").class_bytes["filling"] > 0
        sick.heal()
        assert eventually(lambda: tier(client, "dram").class_bytes["filling"] == 0 and tier(client, "nvme").health == "ok")
        assert [read(client, namespace, chain(seed, 20)) for seed in (1, *range(215, 230))] == [20] * 16


# ---- 39


def test_hundreds_of_waiting_requests_keep_no_thread(tmp_path: Path) -> None:
    """Case 39: over a disk that does not answer, each is submitted and polled in far less than a millisecond; nobody sleeps."""
    with FaultyDaemon(tmp_path, ["--acquire-timeout-s", "30"]) as sick, KVClient(sick.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, namespace, chain(1, WAITING))
        assert all_on_disk(client, WAITING)
        sick.restart(kill=False)
        sick.fault("stuck", "read")
        with Raw(sick.address) as raw:
            ops = [requests.acquire(lease, raw.open(), key, 30.0) for lease, key in enumerate(each_hash(chain(1, WAITING)), 1)]
            threads = threading.active_count()
            submitted: list[Future[Answer]] = []
            took_s = timed([partial(lambda op: submitted.extend(raw.link.submit([op])), op) for op in ops])
            assert statistics.median(took_s) < QUICK_S
            assert threading.active_count() == threads
            assert all(future.result(10) for future in submitted), "each is told at once how many blocks to expect"
            polls = [partial(raw.attached.session.granting, lease) for lease in range(1, WAITING + 1)]
            assert statistics.median(timed(polls)) < QUICK_S
            started_at = time.monotonic()
            assert client.lookup(namespace, chain(1, WAITING)).blocks == WAITING
            assert time.monotonic() - started_at < NOT_LONG_S, "others are answered"
            sick.heal()
            assert eventually(lambda: sum(granting.blocks for poll in polls if (granting := poll())) == WAITING)


def timed(calls: Sequence[Callable[[], object]]) -> list[float]:
    """How long each took, in seconds."""
    took = []
    for call in calls:
        started_at = time.perf_counter()
        call()
        took.append(time.perf_counter() - started_at)
    return took


async def lease_of(client: AsyncKVClient, hashes: bytes) -> int:
    """How many blocks a lease had."""
    async with client.get(await client.open_namespace(IDENTITY, GEOMETRY), hashes) as lease:
        return lease.blocks


async def wait_for_a_daemon_that_stands_still(daemon: DaemonProcess) -> tuple[list[int], float]:
    """What many requests got in the end, and how late the loop was at most while they waited."""
    async with AsyncKVClient(daemon.address) as client:
        namespace = await client.open_namespace(IDENTITY, GEOMETRY)
        async with client.put(namespace, chain(1, 8)) as put:
            for block in put.blocks:
                block.write(pattern(block.hash))
        os.kill(daemon.pid, signal.SIGSTOP)
        gets = [asyncio.create_task(lease_of(client, chain(1, 8))) for _ in range(WAITING)]
        late_s = 0.0
        for _ in range(100):
            due_at = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            late_s = max(late_s, time.monotonic() - due_at)
        assert not any(get.done() for get in gets)
        os.kill(daemon.pid, signal.SIGCONT)
        return list(await asyncio.gather(*gets)), late_s


def test_one_event_loop_waits_for_hundreds_of_requests_and_goes_on(daemon: DaemonProcess) -> None:
    """Case 39: the asynchronous client, with requests waiting for a daemon that stands still: the loop is never blocked."""
    try:
        blocks, late_s = asyncio.run(wait_for_a_daemon_that_stands_still(daemon))
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert blocks == [8] * WAITING
    assert late_s < NOT_LONG_S, "a call that waits for the daemon would wait as long as it stands still"


def test_an_engines_step_never_waits_for_the_daemon(daemon: DaemonProcess) -> None:
    """Case 39: commits, releases and abandons of a paged cache are a matter of microseconds, also while the daemon stands still."""
    with KVClient(daemon.address) as client:
        blocks = client.open_blocks(IDENTITY, GEOMETRY)
        slots = blocks.reserve(100)
        assert len(slots) == 100
        keys = each_hash(chain(1, 100))
        for units, key in zip(slots.units, keys, strict=True):
            start = int(units) * 4096
            blocks.arena[start : start + GEOMETRY.block_bytes] = pattern(key)
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            parents = [bytes(32), *keys]
            took_s = []
            for at in range(100):
                one = Slots(slots.units[at : at + 1], slots.generations[at : at + 1])
                took_s += timed([partial(blocks.commit, 1000 + at, one, keys[at], parents[at]), partial(blocks.release, 1000 + at)])
            assert statistics.median(took_s) < QUICK_S
            assert not blocks.flush(0.05)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert blocks.flush(10.0)
        assert client.lookup(client.open_namespace(IDENTITY, GEOMETRY), chain(1, 100)).blocks == 100
        blocks.close()
        assert eventually(lambda: tier(client, "dram").held_bytes == 0)
