"""Namespaces without end: there is a limit, it says what to do, and a restart forgets those of which nothing is stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore import errors
from kvstore.clients.client import KVClient
from tests.blocks import GEOMETRY, IDENTITY, chain
from tests.cases.figures import all_on_disk, read, store
from tests.daemon.faulty import FaultyDaemon

MOST = 40


def test_a_restart_forgets_the_namespaces_that_have_no_blocks(tmp_path: Path) -> None:
    constants = f"kvstore.daemon.namespaces.MAX_NAMESPACES={MOST}"
    with FaultyDaemon(tmp_path, constants=constants) as daemon, KVClient(daemon.address) as client:
        opened = [client.open_namespace(IDENTITY, GEOMETRY, kv_group=f"g{number}") for number in range(MOST)]
        with pytest.raises(errors.LimitExceeded, match="restart the daemon to forget"):
            client.open_namespace(IDENTITY, GEOMETRY)
        assert client.open_namespace(IDENTITY, GEOMETRY, kv_group="g7").id == opened[7].id, "a known one is always open"
        for namespace in opened[3:39:12]:
            store(client, namespace, chain(namespace.id, 4))
        assert all_on_disk(client, 12)
        daemon.restart()
        assert len(json.loads((daemon.data / "namespaces.json").read_text())) == 3
        for namespace in opened[3:39:12]:
            assert read(client, namespace, chain(namespace.id, 4)) == 4
        fresh = client.open_namespace(IDENTITY, GEOMETRY)
        store(client, fresh, chain(99, 4))
        assert all_on_disk(client, 16)
        daemon.restart()
        assert [read(client, each, chain(seed, 4)) for each, seed in ((fresh, 99), (opened[3], 4))] == [4, 4]
