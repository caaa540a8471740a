"""For people who wonder: what there is of each namespace, and why a prompt is found no further than it is. Changes nothing.

It may go over the whole index and hash a prompt many times, so others have their turn in between, what hashes long does so in a thread,
and few calls are carried out at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvstore import errors
from kvstore.cache.explaining import Reason
from kvstore.cache.messages import MAX_BLOCKS_PER_BATCH, KeepKind, Looked, unpack_hashes
from kvstore.daemon import wire
from kvstore.daemon.hub import Hub
from kvstore.daemon.namespaces import KnownNamespace
from kvstore.hashing import HASH_BYTES, Identity, block_hashes, fingerprint, usable_blocks
from kvstore.proto import kvstore_pb2 as pb

MAX_ELSEWHERE = 8  # places: more of them explain nothing
MAX_EXPLAINED_TOKENS = 131_072  # tokens: the longest prompt that one lookup takes, in blocks of 16
MAX_AT_ONCE = 2  # calls carried out at once: each has a turn of every round of the loop, and a thread
MAX_WAITING = 256  # calls: people ask one at a time, and a thousand clients that fail at once are refused soon
TURN_S = 0.0005  # seconds after which others have their turn: half a millisecond, the time of a lookup
MAX_WINDOW_TOKENS = 2**32 - 1  # tokens: what the message holds; a window in whole blocks may be longer


class Few:
    """Lets few calls be carried out at once."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_AT_ONCE)
        self._here = 0

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Wait for one's turn. Raises ResourceExhausted where too many wait already."""
        if self._here >= MAX_AT_ONCE + MAX_WAITING:
            raise errors.ResourceExhausted(f"{MAX_WAITING} calls of ListNamespaces and Explain wait already; ask again later")
        self._here += 1
        try:
            async with self._room:
                yield
        finally:
            self._here -= 1


class _Turn:
    """Of a call on the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + TURN_S

    async def pause(self) -> None:
        """Let others have theirs, as long, where this one was long: a call of theirs takes several rounds of the loop."""
        if self._loop.time() >= self._until:
            await asyncio.sleep(TURN_S)
            self._until = self._loop.time() + TURN_S


async def list_namespaces(hub: Hub, tenant: str, after: int = 0) -> pb.ListNamespacesReply:
    """The namespaces of a tenant after one of them, as many as a reply holds, with how many blocks of each every tier has."""
    counts = await _counts(hub)
    reply, turn = pb.ListNamespacesReply(epoch=hub.epoch), _Turn()
    tiers = dict.fromkeys(tier for _, tier in counts)
    size_bytes = last = 0
    for each in hub.namespaces.of_tenant(tenant):
        if each.id <= after:
            continue
        if size_bytes >= wire.MAX_REPLY_BYTES:
            reply.more_after = last
            break
        added = reply.namespaces.add(
            digest=each.digest,
            facts={name: value for name, value in each.fields.items() if name != "tenant"},
            keep=pb.Keep(kind=each.keep.kind.value, window_tokens=_window_tokens(each)),
            tails=each.tails,
            slot_bytes=each.geometry.slot_bytes,
            blocks={tier: counts[each.id, tier] for tier in tiers if counts[each.id, tier]},
        )
        size_bytes, last = size_bytes + added.ByteSize(), each.id
        await turn.pause()
    return reply


async def _counts(hub: Hub) -> Counter[tuple[int, str]]:
    """Blocks by namespace and tier; hbm is over all pools, each of which has a core that calls its only tier dram."""
    counts: Counter[tuple[int, str]] = Counter()
    turn = _Turn()
    for number, core in enumerate(hub.caches()):
        for piece in core.census():
            for tier, blocks in piece.items():
                name = "hbm" if number else tier.name.lower()
                counts.update({(each, name): int(blocks[each]) for each in np.flatnonzero(blocks).tolist()})
            await turn.pause()
    return counts


def _window_tokens(namespace: KnownNamespace) -> int:
    return min(namespace.keep.window_blocks * namespace.geometry.block_tokens, MAX_WINDOW_TOKENS)


@dataclass(frozen=True)
class Asked:
    """What is to be found: a chain of `hashes`, or the `token_ids` of a prompt under an adapter and a salt."""

    hashes: bytes
    token_ids: bytes
    adapter: str
    salt: str

    @classmethod
    def of(cls, request: pb.ExplainRequest) -> Asked:
        """From the wire. Raises InvalidArgument, LimitExceeded."""
        if bool(request.hashes) == bool(request.token_ids):
            raise errors.InvalidArgument("explain takes the hashes of a chain, or the token ids of a prompt; give one of them")
        if request.hashes:
            wire.hashes_of(request.hashes)
        if len(wire.tokens_of(request.token_ids)) > MAX_EXPLAINED_TOKENS:
            most = f"the most is {MAX_EXPLAINED_TOKENS}; give the beginning of the prompt"
            raise errors.LimitExceeded(f"token_ids has {len(request.token_ids) // 4} tokens, {most}")
        return cls(request.hashes, request.token_ids, wire.text_of(request.adapter, "adapter"), wire.text_of(request.salt, "salt"))

    def variants(self) -> list[tuple[str, str]]:
        """Adapters and salts under which the same prompt may have been stored, that of this one first."""
        return list(dict.fromkeys(((self.adapter, self.salt), ("", self.salt), (self.adapter, ""), ("", ""))))

    async def chain(self, namespace: KnownNamespace, adapter: str, salt: str, most: int = MAX_BLOCKS_PER_BATCH) -> bytes:
        """Its hashes in a namespace, `most` blocks of it."""
        if self.hashes:
            return self.hashes[: HASH_BYTES * most]
        block_tokens = namespace.geometry.block_tokens
        ids = wire.tokens_of(self.token_ids)
        ids = ids[: block_tokens * min(most, usable_blocks(len(ids), block_tokens))]
        facts = {name: namespace.fields[name] for name in wire.MODEL_FACTS}
        root = fingerprint(Identity(**facts, adapter=adapter, salt=salt))
        return block_hashes(root, ids, block_tokens) if most == 1 else await asyncio.to_thread(block_hashes, root, ids, block_tokens)


@dataclass(frozen=True)
class _Place:
    """Where more of it is."""

    namespace: KnownNamespace
    blocks: int
    differs: Mapping[str, str]

    @property
    def tokens(self) -> int:
        return self.blocks * self.namespace.geometry.block_tokens

    def message(self) -> pb.Elsewhere:
        return pb.Elsewhere(digest=self.namespace.digest, blocks=self.blocks, tokens=self.tokens, differs=self.differs)


async def explain(hub: Hub, namespace: KnownNamespace, asked: Asked) -> pb.ExplainReply:
    """Why a prompt is found no further than it is in a namespace, and where more of it is."""
    chain = await asked.chain(namespace, asked.adapter, asked.salt)
    reply = pb.ExplainReply(epoch=hub.epoch, asked_blocks=len(chain) // HASH_BYTES, blocks=_leading(hub, namespace, chain))
    if reply.blocks < reply.asked_blocks:
        keys, first = unpack_hashes(chain), reply.blocks
        later = np.logical_or.reduce([core.has(namespace.id, keys[first + 1 :]) for core in hub.caches()])
        reply.later_blocks = int(np.count_nonzero(later))
        reply.reason = min((core.why_missing(namespace.id, keys, first) for core in hub.caches()), key=list(Reason).index).value
        most: list[_Place] = []  # no more than are told: there may be thousands
        async for place in _elsewhere(hub, namespace, asked):
            if place.tokens > reply.blocks * namespace.geometry.block_tokens:
                most = sorted([*most, place], key=lambda each: (-each.tokens, len(each.differs)))[:MAX_ELSEWHERE]
        reply.elsewhere.extend(place.message() for place in most)
    return reply


async def _elsewhere(hub: Hub, namespace: KnownNamespace, asked: Asked) -> AsyncIterator[_Place]:
    """Wherever the beginning of it is, but in the namespace and under the identity that were asked for."""
    turn = _Turn()
    for other in hub.namespaces.of_tenant(namespace.tenant):
        for adapter, salt in asked.variants() if asked.token_ids else [(asked.adapter, asked.salt)]:
            await turn.pause()
            mine = {**namespace.fields, "adapter": asked.adapter, "salt": asked.salt}
            theirs = {**other.fields, "adapter": adapter, "salt": salt}
            differs = {name: value for name, value in theirs.items() if mine.get(name) != value}
            whole = other.keep.kind is KeepKind.ALL  # else the first blocks may be gone, and the prefix is there all the same
            if not differs or (whole and not _leading(hub, other, await asked.chain(other, adapter, salt, 1))):
                continue
            yield _Place(other, _leading(hub, other, await asked.chain(other, adapter, salt)), differs)


def _leading(hub: Hub, namespace: KnownNamespace, hashes: bytes) -> int:
    """How many leading blocks are here."""
    if not hashes:
        return 0
    dram, *pools = hub.caches()
    found = dram.lookup(namespace.tenant, namespace.id, "", unpack_hashes(hashes), pools)
    return found.blocks if isinstance(found, Looked) else 0
