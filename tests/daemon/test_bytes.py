"""Read and Write by hand: bytes for clients on another machine, in pieces, checked at both ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import grpc
import numpy as np
import pytest

from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.steps import packed_checksum
from kvstore.geometry import Geometry
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub
from kvstore.testing.daemon import DaemonProcess
from tests.blocks import GEOMETRY, IDENTITY, chain, each_hash, pattern, right
from tests.daemon.test_ends_of_sessions import eventually, held_bytes

LARGE = Geometry("mha", 8, 8, 128, 128, "bfloat16", 64)  # 2 MiB a block: several pieces


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon")) as process:
        yield process


@pytest.fixture
def client(shared: DaemonProcess) -> Iterator[KVClient]:
    with KVClient(shared.address) as made:
        made.clear()
        yield made
        eventually(lambda: held_bytes(made) == 0)


@pytest.fixture
def stub(shared: DaemonProcess) -> Iterator[KVStoreStub]:
    with grpc.insecure_channel(f"unix:{shared.address}") as channel:
        yield KVStoreStub(channel)


def pieces_of(namespace: Namespace, hashes: bytes, step_bytes: int = 2**20) -> Iterator[pb.BlockBytes]:
    """What a right client sends."""
    parent = namespace.root
    for key in each_hash(hashes):
        data = pattern(key, namespace.geometry.block_bytes).tobytes()
        for start in range(0, len(data), step_bytes):
            last = start + step_bytes >= len(data)
            yield pb.BlockBytes(
                namespace_id=namespace.id,
                epoch=namespace.epoch,
                hash=key,
                parent=parent,
                offset_bytes=start,
                data=data[start : start + step_bytes],
                last=last,
                checksum=packed_checksum(namespace.digest, key, data) if last else b"",
            )
        parent = key


def code_of(error: pytest.ExceptionInfo[grpc.RpcError]) -> grpc.StatusCode:
    value: Any = error.value
    return cast(grpc.StatusCode, value.code())


@pytest.mark.parametrize("geometry", [GEOMETRY, LARGE])
def test_blocks_sent_in_pieces_are_found_in_the_arena_and_come_back(
    stub: KVStoreStub, client: KVClient, geometry: Geometry
) -> None:
    namespace = client.open_namespace(IDENTITY, geometry)
    hashes = chain(1, 3)
    reply = stub.Write(pieces_of(namespace, hashes, 700_000))
    assert reply.outcomes == bytes([2, 2, 2])
    with client.get(namespace, hashes) as lease:
        assert [np.array_equal(view, pattern(key, geometry.block_bytes)) for view, key in zip(lease.views, each_hash(hashes), strict=True)]
    request = pb.ReadRequest(namespace_id=namespace.id, hashes=hashes, timeout_s=1, epoch=namespace.epoch)
    data = b""
    for piece in stub.Read(request):
        assert len(piece.data) <= 2**20
        data += piece.data
        if piece.last:
            assert piece.checksum == packed_checksum(namespace.digest, piece.hash, data)
            assert data == pattern(piece.hash, geometry.block_bytes).tobytes()
            data = b""


def test_a_read_stops_at_the_first_block_that_is_missing(stub: KVStoreStub, client: KVClient) -> None:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    stub.Write(pieces_of(namespace, chain(2, 2)))
    request = pb.ReadRequest(namespace_id=namespace.id, hashes=chain(2, 4), timeout_s=1, epoch=namespace.epoch)
    assert [piece.hash for piece in stub.Read(request)] == each_hash(chain(2, 2))


def test_a_read_that_is_cut_off_leaves_no_lease(stub: KVStoreStub, client: KVClient) -> None:
    namespace = client.open_namespace(IDENTITY, LARGE)
    stub.Write(pieces_of(namespace, chain(3, 8)))
    stream = stub.Read(pb.ReadRequest(namespace_id=namespace.id, hashes=chain(3, 8), timeout_s=1, epoch=namespace.epoch))
    next(stream)
    stream.cancel()
    eventually(lambda: held_bytes(client) == 0)


def test_a_block_that_is_stored_already_is_read_past(stub: KVStoreStub, client: KVClient) -> None:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    stub.Write(pieces_of(namespace, chain(4, 2)))
    assert stub.Write(pieces_of(namespace, chain(4, 3))).outcomes == bytes([3, 3, 2])


def test_a_wrong_checksum_stores_nothing(stub: KVStoreStub, client: KVClient) -> None:
    namespace = client.open_namespace(IDENTITY, GEOMETRY)
    (piece,) = pieces_of(namespace, chain(5, 1))
    piece.data = bytes(GEOMETRY.block_bytes)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Write(iter([piece]))
    assert code_of(caught) is grpc.StatusCode.DATA_LOSS
    assert client.lookup(namespace, chain(5, 1)).blocks == 0
    assert stub.Write(pieces_of(namespace, chain(5, 1))).outcomes == bytes([2])


@pytest.mark.parametrize("fault", ["offset", "gap", "early_last", "no_last", "empty", "hash", "half", "namespace", "epoch"])
def test_malformed_pieces_are_refused_and_leave_nothing(stub: KVStoreStub, client: KVClient, fault: str) -> None:
    namespace = client.open_namespace(IDENTITY, LARGE)
    pieces = list(pieces_of(namespace, chain(6, 1)))
    match fault:
        case "offset":
            pieces[1].offset_bytes = 5
        case "gap":
            del pieces[0]
        case "early_last":
            pieces[0].last = True
        case "no_last":
            pieces[-1].last = False
        case "empty":
            pieces[0].data = b""
        case "hash":
            pieces[1].hash = bytes(32)
        case "half":
            del pieces[-1]
        case "namespace":
            pieces[0].namespace_id = 77
        case _:
            pieces[0].epoch = "another"
    with pytest.raises(grpc.RpcError) as caught:
        stub.Write(iter(pieces))
    expected = {"namespace": grpc.StatusCode.NOT_FOUND, "epoch": grpc.StatusCode.FAILED_PRECONDITION}
    assert code_of(caught) is expected.get(fault, grpc.StatusCode.INVALID_ARGUMENT)
    assert client.lookup(namespace, chain(6, 1)).blocks == 0
    eventually(lambda: held_bytes(client) == 0)


def test_a_writer_that_vanishes_half_way_leaves_the_key_free(stub: KVStoreStub, client: KVClient, shared: DaemonProcess) -> None:
    namespace = client.open_namespace(IDENTITY, LARGE)
    first = next(iter(pieces_of(namespace, chain(7, 1))))

    def stalls() -> Iterator[pb.BlockBytes]:
        yield first
        eventually(lambda: held_bytes(client) > 0, 5.0)
        raise RuntimeError("the writer is gone")

    with pytest.raises(grpc.RpcError):
        stub.Write(stalls())
    eventually(lambda: held_bytes(client) == 0)
    assert stub.Write(pieces_of(namespace, chain(7, 1))).outcomes == bytes([2])


def test_a_write_into_a_full_store_says_so_and_stops(stub: KVStoreStub, client: KVClient, shared: DaemonProcess) -> None:
    with KVClient(shared.address) as greedy:
        blocks = greedy.open_blocks(IDENTITY, LARGE)
        taken = blocks.reserve(1000)
        assert 0 < len(taken) < 1000
        namespace = client.open_namespace(IDENTITY, LARGE)
        assert stub.Write(pieces_of(namespace, chain(8, 3))).outcomes == bytes([5, 0, 0]), "NO_ROOM, and the rest is not tried"
        blocks.close()
    eventually(lambda: held_bytes(client) == 0)
    assert stub.Write(pieces_of(namespace, chain(8, 3))).outcomes == bytes([2, 2, 2])


def test_over_tcp_a_client_works_like_any_other(shared: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with DaemonProcess(tmp_path_factory.mktemp("tcp"), ["--tcp", f"127.0.0.1:{port}"]), KVClient(f"127.0.0.1:{port}") as client:
        namespace = client.open_namespace(IDENTITY, GEOMETRY)
        with client.put(namespace, chain(9, 2)) as put:
            for block in put.blocks:
                block.write(pattern(block.hash))
        with client.get(namespace, chain(9, 2)) as lease:
            assert right(lease.views, chain(9, 2))
