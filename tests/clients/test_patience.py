"""What is made of a store that cannot serve: which error, for how long it is left alone, and how often that is said."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from kvstore import errors
from kvstore.clients import patience
from kvstore.clients.client import KVClient
from kvstore.clients.patience import TROUBLE, Patience, Warnings
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY

LOG = logging.getLogger("test.patience")


@pytest.fixture
def another_server(tmp_path: Path) -> Iterator[str]:
    """A gRPC server that is no daemon."""
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    place = str(tmp_path / "other.sock")
    server.add_insecure_port(f"unix:{place}")
    server.start()
    yield place
    server.stop(None).wait()


def test_another_server_is_no_daemon_and_its_address_is_named(another_server: str) -> None:
    with KVClient(another_server) as client, pytest.raises(errors.Unavailable, match="no kvstore daemon") as caught:
        client.open_namespace(IDENTITY, GEOMETRY)
    assert another_server in str(caught.value)
    assert isinstance(caught.value, TROUBLE)


def test_blocks_that_are_larger_than_an_extent_are_trouble(tmp_path: Path) -> None:
    large = replace(GEOMETRY, block_tokens=16_384)
    with (
        DaemonProcess(tmp_path / "d", nvme=False, dram="16MiB") as daemon,
        KVClient(daemon.address) as client,
        pytest.raises(errors.LimitExceeded, match="exceeds an extent") as caught,
    ):
        client.open_namespace(IDENTITY, large)
    assert isinstance(caught.value, TROUBLE)


def test_what_fails_with_every_request_is_said_once_a_while(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = Warnings(LOG)
    for _ in range(100):
        warnings.say("a save failed", errors.LimitExceeded("too large"))
        warnings.say("a save failed", errors.Corruption("flipped"))
        warnings.say("a load failed", errors.Corruption("flipped"))
    assert len(caplog.records) == 3
    monkeypatch.setattr(patience, "SAID_S", 0.0)
    warnings.say("a save failed", errors.Corruption("flipped"))
    assert caplog.messages[-1] == "a save failed: Corruption: flipped"
    assert len(caplog.records) == 4


def test_a_store_in_trouble_is_left_alone_and_every_fault_told(caplog: pytest.LogCaptureFixture) -> None:
    user = Patience(LOG)
    user.check()
    for _ in range(5):
        assert user.excuse(errors.LimitExceeded("a block is too large")) == "LimitExceeded: a block is too large"
    with pytest.raises(errors.Unavailable, match="moment ago"):
        user.check()
    assert caplog.messages == ["going on without the store: LimitExceeded: a block is too large"]
