"""A session without the client's comforts: any operation in any order, and groups."""

from __future__ import annotations

from typing import Self

import grpc

from kvstore.clients import requests
from kvstore.clients.answers import Answer, Slotted
from kvstore.clients.channel import OPTIONS, error_of, target
from kvstore.clients.link import Link, Unmapped
from kvstore.clients.requests import KEEP_ALL, Keep
from kvstore.clients.session import Granting
from kvstore.geometry import Geometry
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub
from tests.blocks import GEOMETRY, IDENTITY

TIMEOUT_S = 10.0  # seconds: far beyond what any call here takes


class Raw:
    """Attached when made. Use it in a `with` block."""

    def __init__(self, address: str, *, guarantee_bytes: int = 0, limit_bytes: int = 0) -> None:
        self.place = target(address)
        self.channel = grpc.insecure_channel(self.place, OPTIONS)
        self.stub = KVStoreStub(self.channel)
        self.link = Link(self.stub, self.place, requests.hello("raw", guarantee_bytes, limit_bytes))
        opened = self.link.open()
        assert not isinstance(opened, Unmapped)
        self.attached = opened

    def open(self, geometry: Geometry = GEOMETRY, shard: str = "", kv_group: str = "", keep: Keep = KEEP_ALL) -> int:
        """A namespace's id."""
        request = requests.open_namespace(IDENTITY, geometry, shard, kv_group, keep)
        reply: pb.OpenNamespaceReply = self.stub.OpenNamespace(request, timeout=TIMEOUT_S)
        return reply.namespace_id

    def join(self, group: str, namespaces: list[int]) -> None:
        """Become a member of a group."""
        session = self.attached.session
        self.stub.JoinGroup(
            pb.JoinGroupRequest(session=session.id, group=group, namespace_ids=namespaces, epoch=session.epoch), timeout=TIMEOUT_S
        )

    def lookup(self, hashes: bytes, *, namespace: int = 0, group: str = "") -> int:
        """How many leading blocks are here."""
        request = pb.LookupRequest(namespace_id=namespace, group=group, hashes=hashes, epoch=self.attached.session.epoch)
        reply: pb.LookupReply = self.stub.Lookup(request, timeout=TIMEOUT_S)
        return reply.blocks

    def ask(self, *ops: pb.Op) -> list[Answer]:
        """One batch."""
        return self.link.ask(list(ops), TIMEOUT_S)

    def slots(self, op: pb.Op) -> Slotted:
        """A Reserve, Commit or Claim that succeeds."""
        answer = self.ask(op)[0]
        assert isinstance(answer, Slotted), answer
        return answer

    def acquire(self, lease: int, hashes: bytes, *, namespace: int = 0, group: str = "", timeout_s: float = 5.0) -> Granting:
        """A lease, once nothing more will be granted under it."""
        op = pb.Op(acquire=pb.Acquire(lease=lease, namespace_id=namespace, group=group, hashes=hashes, timeout_s=timeout_s))
        return self.link.take(op, TIMEOUT_S)

    def raised(self, error: grpc.RpcError) -> Exception:
        """What a client's caller would see."""
        return error_of(error, self.place)

    def close(self) -> None:
        """End the session, in order where nothing is held."""
        self.link.close()
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
