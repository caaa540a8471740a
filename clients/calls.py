"""Calls that hold nothing: lookup, prefetch, pin, clear, stats, explain. Generators of steps.py's commands."""

from __future__ import annotations

from typing import Any, cast

from kvstore.clients.handles import LookupResult, Namespace
from kvstore.clients.steps import Call, Command, Steps, of_namespace, persistent
from kvstore.proto import kvstore_pb2 as pb

CLEAR_TIMEOUT_S = 60.0  # Clear waits until the disk has forgotten too


def lookup(namespace: Namespace, hashes: bytes) -> Steps[LookupResult]:
    """How many leading blocks are here. Of a prompt shorter than a block none can be, and nothing is asked."""
    if not hashes:
        return LookupResult(0, b"")

    def make(namespace_id: int, epoch: str) -> Command:
        return Call("Lookup", pb.LookupRequest(namespace_id=namespace_id, hashes=hashes, epoch=epoch))

    reply: pb.LookupReply = yield from of_namespace(namespace, make)
    return LookupResult(reply.blocks, reply.tiers[0][: reply.blocks] if reply.tiers else b"")


def pin(namespace: Namespace, hashes: bytes, method: str) -> Steps[int]:
    """Pin or Unpin; how many blocks changed."""
    if not hashes:
        return 0

    def make(namespace_id: int, epoch: str) -> Command:
        return Call(method, pb.PinRequest(namespace_id=namespace_id, hashes=hashes, epoch=epoch))

    reply: pb.PinReply = yield from of_namespace(namespace, make)
    return reply.blocks


def prefetch(namespace: Namespace, hashes: bytes) -> Steps[tuple[int, int]]:
    """Start bringing blocks into memory; (started, already there)."""
    if not hashes:
        return 0, 0

    def make(namespace_id: int, epoch: str) -> Command:
        return Call("Prefetch", pb.PrefetchRequest(namespace_id=namespace_id, hashes=hashes, epoch=epoch))

    reply: pb.PrefetchReply = yield from of_namespace(namespace, make)
    return reply.started_blocks, reply.present_blocks


def clear(namespace: Namespace | None) -> Steps[pb.ClearReply]:
    """Forget one namespace, or all of this tenant."""
    if namespace is None:
        return cast(pb.ClearReply, (yield Call("Clear", pb.ClearRequest(), CLEAR_TIMEOUT_S)))

    def make(namespace_id: int, epoch: str) -> Command:
        return Call("Clear", pb.ClearRequest(namespace_id=namespace_id, epoch=epoch), CLEAR_TIMEOUT_S)

    return cast(pb.ClearReply, (yield from of_namespace(namespace, make)))


def stats() -> Steps[pb.StatsReply]:
    """The daemon's figures."""
    return cast(pb.StatsReply, (yield from persistent(lambda: _one(Call("Stats", pb.StatsRequest())))))


def namespaces() -> Steps[pb.ListNamespacesReply]:
    """All that there are, in however many replies they come."""

    def attempt() -> Steps[pb.ListNamespacesReply]:
        listed: pb.ListNamespacesReply = yield Call("ListNamespaces", pb.ListNamespacesRequest())
        while listed.more_after:
            rest = pb.ListNamespacesRequest(epoch=listed.epoch, after=listed.more_after)
            more: pb.ListNamespacesReply = yield Call("ListNamespaces", rest)
            listed.namespaces.extend(more.namespaces)
            listed.more_after = more.more_after
        return listed

    return (yield from persistent(attempt))


def explain(namespace: Namespace, request: pb.ExplainRequest) -> Steps[pb.ExplainReply]:
    """Why no more of a prompt is found."""
    if not request.hashes and not request.token_ids:
        return pb.ExplainReply()

    def make(namespace_id: int, epoch: str) -> Command:
        request.namespace_id, request.epoch = namespace_id, epoch
        return Call("Explain", request)

    return cast(pb.ExplainReply, (yield from of_namespace(namespace, make)))


def _one(command: Command) -> Steps[Any]:
    return (yield command)
