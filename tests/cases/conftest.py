"""Daemons and clients of these tests: one's own where it is restarted or damaged, one for a whole module where it is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.clients.client import KVClient
from kvstore.testing.daemon import DaemonProcess
from tests.cases.figures import nothing_held


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[KVClient]:
    """A client of the test's own daemon."""
    with KVClient(daemon.address) as each:
        yield each


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon for all tests of a module that leave it as it is. 64 MiB of memory and of disk."""
    with DaemonProcess(tmp_path_factory.mktemp("shared")) as process:
        yield process


@pytest.fixture
def guest(shared: DaemonProcess) -> Iterator[KVClient]:
    """A client of the shared daemon, in which nothing is stored, and nothing is held by anybody of an earlier test."""
    with KVClient(shared.address) as each:
        each.clear()
        assert nothing_held(each)
        yield each
