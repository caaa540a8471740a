"""The lanes do what they are given, all of it, and never keep the process from ending. With the mover and a real disk: no byte astray."""

from __future__ import annotations

import queue
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.cache.messages import StartWrite, TransferResult
from kvstore.daemon.jobs import DeleteJob, Job, Moved
from kvstore.daemon.lanes import Lanes
from kvstore.daemon.mover import Mover, MoverLimits, Pulls
from tests.daemon.test_copier import EXTENT_UNITS, MEMORY_UNITS, NAMESPACES, SLOT_UNITS, Rig, down, up

WAIT_S = 60.0  # seconds: far beyond what any of this takes
Finished = tuple[Job, list[Moved]]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "nvme")
    yield rig
    rig.disk.close()


def test_every_job_is_delivered_with_its_results() -> None:
    delivered: queue.SimpleQueue[Finished] = queue.SimpleQueue()
    lanes: Lanes[DeleteJob] = Lanes(3, lambda job: [Moved(TransferResult.OK)], lambda job, moved: delivered.put((job, moved)))
    jobs = [DeleteJob(()) for _ in range(100)]
    for job in jobs:
        lanes.submit(job)
    assert lanes.close(WAIT_S)
    assert {id(delivered.get(timeout=WAIT_S)[0]) for _ in jobs} == {id(job) for job in jobs}
    assert delivered.empty()


def test_a_stuck_lane_is_reported_and_does_not_hold_up_the_others() -> None:
    stuck, delivered = threading.Event(), threading.Semaphore(0)

    def run(job: Job) -> list[Moved]:
        if job is first:
            stuck.wait(WAIT_S)
        return []

    first = DeleteJob(())
    lanes = Lanes(2, run, lambda *_: delivered.release())
    lanes.submit(first)
    lanes.submit(DeleteJob(()))
    assert delivered.acquire(timeout=WAIT_S)
    assert not lanes.close(0.05)
    stuck.set()
    assert lanes.close(WAIT_S)


def test_a_process_with_a_stuck_lane_can_end() -> None:
    program = (
        "import threading\n"
        "from kvstore.daemon.jobs import DeleteJob\n"
        "from kvstore.daemon.lanes import Lanes\n"
        "begun = threading.Event()\n"
        "lanes = Lanes(1, lambda job: begun.set() or threading.Event().wait(), print)\n"
        "lanes.submit(DeleteJob(()))\n"
        "begun.wait()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=WAIT_S, check=False).returncode == 0


def test_under_interleaved_load_every_byte_belongs_to_its_key(rig: Rig) -> None:
    """Blocks 0..39 go down again and again while others come up into the second half of memory, and are compared there."""
    blocks = range(40)
    for number in blocks:
        rig.fill(number)
    chance = random.Random(7)
    wanted: list[StartWrite] = []
    delivered: queue.SimpleQueue[Finished] = queue.SimpleQueue()
    lanes = Lanes(4, rig.copier.run, lambda job, moved: delivered.put((job, moved)))
    mover = Mover(MoverLimits(4, 24, EXTENT_UNITS), NAMESPACES, Pulls(lambda limit: [wanted.pop() for _ in range(min(limit, len(wanted)))]))
    places = MEMORY_UNITS // SLOT_UNITS - len(blocks)
    sums: dict[int, tuple[int, int]] = {}
    for turn in range(60):
        readable = sorted(chance.sample(sorted(sums), min(places, len(sums), 20)))
        wanted.extend(down(number) for number in chance.sample(blocks, 15) if number not in readable)
        at = dict(zip(readable, chance.sample(range(len(blocks), len(blocks) + places), len(readable)), strict=True))
        for number in readable:
            mover.add(up(number, at[number], sums[number]))
        while not mover.idle or wanted:
            for job in mover.next_jobs(float(turn)):
                lanes.submit(job)
            job, moved = delivered.get(timeout=WAIT_S)
            for report in mover.finished(job, moved, float(turn)):
                assert report.result is TransferResult.OK
                assert report.checksum is not None
                assert sums.setdefault(report.transfer, report.checksum) == report.checksum
        assert all(rig.holds(number, place) for number, place in at.items())
    assert lanes.close(WAIT_S)
    assert len(sums) == len(blocks)
