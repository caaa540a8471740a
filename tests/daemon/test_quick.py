"""The socket for lookups alone: the service's own answers and errors, and clients that do without it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import errors
from kvstore.clients import quick as ours
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.daemon import quick as theirs
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.lookups import MAGIC, REPLY, REQUEST, SUFFIX
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, pattern

TIMEOUT_S = 15.0  # seconds: far beyond what an answer takes


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("quick"), nvme=False) as process:
        yield process


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[KVClient]:
    with KVClient(daemon.address) as made:
        yield made


def stored(client: KVClient, seed: int, blocks: int) -> tuple[Namespace, bytes]:
    """A chain that is there."""
    space, hashes = client.open_namespace(IDENTITY, GEOMETRY), chain(seed, blocks)
    with client.put(space, hashes) as put:
        for block in put.blocks:
            block.write(pattern(block.hash))
    return space, hashes


def request(space: Namespace, hashes: bytes, epoch: str = "") -> pb.LookupRequest:
    return pb.LookupRequest(namespace_id=space.id, hashes=hashes, epoch=epoch or space.epoch)


def connected(daemon: DaemonProcess) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    connection.connect(daemon.address + SUFFIX)
    return connection


@pytest.mark.parametrize(("blocks", "more"), [(5, 0), (3, 4), (0, 2), (2048, 100)])
def test_it_answers_as_the_service_does(client: KVClient, blocks: int, more: int) -> None:
    space, hashes = stored(client, 100 + blocks, blocks) if blocks else (client.open_namespace(IDENTITY, GEOMETRY), b"")
    asked = request(space, hashes + chain(7, more))
    answer = client._quick.ask(asked, TIMEOUT_S)
    assert answer is not None
    assert answer.blocks == blocks
    assert answer == client._stub.Lookup(asked, timeout=TIMEOUT_S)
    assert client.lookup(space, asked.hashes).blocks == blocks


def test_its_errors_are_those_of_the_service(client: KVClient) -> None:
    space, hashes = stored(client, 2, 2)
    with pytest.raises(errors.StaleEpoch):
        client._quick.ask(request(space, hashes, "f" * 16), TIMEOUT_S)
    other = request(space, hashes)
    other.namespace_id = 999
    with pytest.raises(errors.NotFound, match="namespace 999 is not open"):
        client._quick.ask(other, TIMEOUT_S)
    with pytest.raises(errors.InvalidArgument):
        client._quick.ask(request(space, b""), TIMEOUT_S)
    assert client.lookup(space, hashes).blocks == 2


def test_a_request_may_come_byte_by_byte_but_not_before_the_last_ones_answer(daemon: DaemonProcess, client: KVClient) -> None:
    space, hashes = stored(client, 3, 3)
    message = REQUEST.pack(MAGIC, space.id, 3, space.epoch.encode()) + hashes
    answer = REPLY.pack(0, 3) + b"\1\1\1"  # dram
    with connected(daemon) as connection:
        for byte in message:
            connection.sendall(bytes([byte]))
        assert connection.recv(100) == answer
        connection.sendall(message)
        assert connection.recv(100) == answer
        connection.sendall(message + message)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b"", "others would wait for all that one sends ahead"
    assert client.lookup(space, hashes).blocks == 3


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\n" + bytes(20), REQUEST.pack(MAGIC, 1, 8193, b"e")])
def test_what_is_no_request_is_cut_off(daemon: DaemonProcess, client: KVClient, start: bytes) -> None:
    with connected(daemon) as connection:
        connection.sendall(start)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(10) == b""
    space, hashes = stored(client, 4, 1)
    assert client.lookup(space, hashes).blocks == 1


def test_without_it_the_service_answers(daemon: DaemonProcess, client: KVClient) -> None:
    """There are no more connections to be had, so a client asks over gRPC."""
    space, hashes = stored(client, 5, 2)
    client._quick.close()  # what it has would serve it
    client._quick.way._again_at = 0.0
    taken = [connected(daemon) for _ in range(theirs.MAX_CONNECTIONS)]
    try:
        assert client._quick.ask(request(space, hashes), TIMEOUT_S) is None
        assert client.lookup(space, hashes).blocks == 2
    finally:
        for connection in taken:
            connection.close()
    assert ours.QuickLookups("localhost:7").ask(request(space, hashes), TIMEOUT_S) is None
    assert ours.QuickLookups("unix:/nowhere/s").ask(request(space, hashes), TIMEOUT_S) is None


def test_threads_have_connections_of_their_own(client: KVClient) -> None:
    """Each gets the answers to its own questions."""
    space, hashes = stored(client, 6, 64)
    wrong: list[int] = []

    def look(blocks: int) -> None:
        found = [client.lookup(space, hashes[: 32 * blocks]).blocks for _ in range(50)]
        wrong.extend(each for each in found if each != blocks)

    threads = [threading.Thread(target=look, args=(blocks,)) for blocks in (1, 7, 30, 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not wrong


def test_a_restart_is_seen_by_who_was_connected(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, nvme=False) as daemon, KVClient(daemon.address) as client:
        space, hashes = stored(client, 8, 2)
        assert client.lookup(space, hashes).blocks == 2
        assert os.stat(daemon.address + SUFFIX).st_mode & 0o777 == 0o660
        daemon.restart()
        assert client.lookup(space, hashes).blocks == 0
        daemon.stop()
        assert not os.path.exists(daemon.address + SUFFIX)
        with pytest.raises(errors.Unavailable):
            client.lookup(space, hashes)


def test_an_answer_that_does_not_come_is_an_error_in_time(tmp_path: Path) -> None:
    """From who is new there and from who was; the late answer is nobody's."""
    lookups = ours.QuickLookups(f"unix:{tmp_path / 's'}")
    asked = pb.LookupRequest(namespace_id=1, epoch="e", hashes=bytes(32))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s") + SUFFIX)
        listener.listen(4)
        with pytest.raises(errors.DeadlineExceeded):
            lookups.ask(asked, 0.05)
        silent, _ = listener.accept()
        answered = threading.Thread(target=lambda: listener.accept()[0].sendall(REPLY.pack(0, 1) + b"\1"))
        answered.start()
        reply = lookups.ask(asked, TIMEOUT_S)
        assert reply is not None
        assert reply.blocks == 1
        answered.join(TIMEOUT_S)
        silent.close()
        lookups.close()
