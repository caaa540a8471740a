"""Ctrl-C at any moment of a get or a put: nothing stays leased or reserved, and the client goes on. A program of its own is interrupted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvstore.testing.daemon import DaemonProcess

INTERRUPTED = """
import random, signal, sys
from kvstore.clients.client import KVClient
from tests.blocks import GEOMETRY, IDENTITY, chain
from tests.cases.figures import eventually

MOMENTS = 300
armed = False

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
rng = random.Random(1)
with KVClient(sys.argv[1]) as client:
    namespace, hashes = client.open_namespace(IDENTITY, GEOMETRY), chain(1, 4)
    with client.put(namespace, hashes) as put:
        put.write_all([bytes(GEOMETRY.block_bytes)] * 4)
    came = 0
    for moment in range(MOMENTS):
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 0.00002 + 0.002 * rng.random())
                while True:
                    with client.get(namespace, hashes) as lease:
                        lease.check()
                    with client.put(namespace, chain(2 + moment, 2)) as put:
                        if moment % 2 and len(put.blocks):
                            put.blocks[0].done()
            finally:
                armed = False
        except KeyboardInterrupt:
            came += 1
    assert came == MOMENTS, came
    with client.get(namespace, hashes) as lease:
        assert lease.blocks == 4

    def held():
        return [(each.leases, each.reserved_slots) for each in client.stats().sessions]

    assert eventually(lambda: held() == [(0, 0)]), held()  # what was told last may be on its way
"""


def test_an_interrupt_at_any_moment_leaves_nothing_held(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", nvme=False) as daemon:
        done = subprocess.run([sys.executable, "-c", INTERRUPTED, daemon.address], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
