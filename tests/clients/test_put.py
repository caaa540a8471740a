"""What a put gives back: every slot that it does not leave in the store."""

from __future__ import annotations

from pathlib import Path

from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, pattern
from tests.cases.figures import eventually, nothing_held, tier


def test_a_slot_whose_block_another_session_committed_first_is_given_back(tmp_path: Path) -> None:
    hashes = chain(1, 1)
    with DaemonProcess(tmp_path) as daemon, KVClient(daemon.address) as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        with client.put(namespace, hashes) as put:
            put.blocks[0].write(pattern(hashes))
            other = client.open_blocks(IDENTITY, GEOMETRY)
            slots = other.reserve(1)
            other.arena[4096 * int(slots.units[0]) :][: GEOMETRY.block_bytes] = pattern(hashes)
            other.commit(1, slots, hashes, namespace.root)
            assert other.flush(5.0)
            other.close()
        assert put.names == ("exists",)
        assert eventually(lambda: tier(client, "dram").class_bytes["reserved"] == 0)
        assert nothing_held(client)
