"""What a session's stream says about pools of GPU memory, between the wire and the pools."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore import errors
from kvstore.cache.core import Cache
from kvstore.daemon import wire
from kvstore.daemon.pools import Pools, Terms
from kvstore.proto import kvstore_pb2 as pb

MAX_POOLS = 64  # GPUs in one Hello: four times what a machine has


def pool_terms(pools: Pools | None, hello: pb.Hello, limit_bytes: int) -> dict[int, Terms]:
    """The pools that a Hello gets, by number. A GPU that the daemon has none on is left out. Raises InvalidArgument, LimitExceeded.

    `limit_bytes`: the most that the daemon lets a session hold in any one of them; 0 is no limit.
    """
    if not hello.pools:
        return {}
    if not hello.maps_arena:
        raise errors.InvalidArgument("pools without maps_arena; the lock of the session's file says when the process has left them, too")
    if len(hello.pools) > MAX_POOLS:
        raise errors.LimitExceeded(f"{len(hello.pools)} GPUs in a Hello, the most is {MAX_POOLS}")
    limits = [min(filter(None, (each.limit_bytes, limit_bytes)), default=0) for each in hello.pools]
    wanted = {wire.text_of(each.uuid, "uuid"): Terms(each.guarantee_bytes, limit) for each, limit in zip(hello.pools, limits, strict=True)}
    if len(wanted) < len(hello.pools):
        raise errors.InvalidArgument("a Hello names a GPU twice; give each once, with all that is wanted there")
    return pools.asked(wanted) if pools is not None else {}


def pool_offers(pools: Pools | None, terms: Mapping[int, Terms]) -> list[pb.PoolOffer]:
    """What a Welcome says of them."""
    if pools is None:
        return []
    offers = [pools.all[number] for number in terms]
    return [
        pb.PoolOffer(pool=pool.number, uuid=pool.tier.pool.uuid, socket_path=str(pool.socket_path), bytes=pool.tier.capacity_bytes)
        for pool in offers
    ]


def core_in(pools: Pools | None, number: int, request: wire.Input) -> Cache:
    """Where an operation in a pool belongs. Raises InvalidArgument, LimitExceeded, Unavailable."""
    if pools is None:
        raise errors.InvalidArgument(f"pool {number}: the daemon keeps no blocks in GPU memory; leave the pool out, or start it with --hbm")
    return pools.core_for(number, request.session, request)
