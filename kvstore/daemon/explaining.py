"""For people who wonder: what there is of each namespace, and why a prompt is found no further than it is. Changes nothing.

It may go over the whole index and hash a prompt many times, so others have their turn in between, and what hashes long does so in a thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
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
NAMESPACES_PER_TURN = 16  # namespaces: looking into each takes some ten microseconds


async def list_namespaces(hub: Hub, tenant: str) -> pb.ListNamespacesReply:
    """Every namespace of a tenant, with how many blocks of it each tier has."""
    counts: Counter[tuple[int, str]] = Counter()  # by namespace and tier
    for core in hub.caches():
        for piece in core.census():
            for tier, blocks in piece.items():
                counts.update({(each, tier.name.lower()): int(blocks[each]) for each in np.flatnonzero(blocks).tolist()})
            await asyncio.sleep(0)
    reply = pb.ListNamespacesReply(epoch=hub.epoch)
    tiers = dict.fromkeys(tier for _, tier in counts)
    for each in hub.namespaces.of_tenant(tenant):
        reply.namespaces.add(
            digest=each.digest,
            facts={name: value for name, value in each.fields.items() if name != "tenant"},
            keep=pb.Keep(kind=each.keep.kind.value, window_tokens=each.keep.window_blocks * each.geometry.block_tokens),
            tails=each.tails,
            slot_bytes=each.geometry.slot_bytes,
            blocks={tier: counts[each.id, tier] for tier in tiers if counts[each.id, tier]},
        )
    return reply


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


async def explain(hub: Hub, namespace: KnownNamespace, asked: Asked) -> pb.ExplainReply:
    """Why a prompt is found no further than it is in a namespace, and where more of it is."""
    chain = await asked.chain(namespace, asked.adapter, asked.salt)
    reply = pb.ExplainReply(epoch=hub.epoch, asked_blocks=len(chain) // HASH_BYTES, blocks=_leading(hub, namespace, chain))
    if reply.blocks < reply.asked_blocks:
        keys, first = unpack_hashes(chain), reply.blocks
        later = np.logical_or.reduce([core.has(namespace.id, keys[first + 1 :]) for core in hub.caches()])
        reply.later_blocks = int(np.count_nonzero(later))
        reasons = [core.why_missing(namespace.id, keys, first) for core in hub.caches()]
        reply.reason = next((reason for reason in reasons if reason is not Reason.NOT_STORED), Reason.NOT_STORED).value
        found = reply.blocks * namespace.geometry.block_tokens
        elsewhere = [each async for each in _elsewhere(hub, namespace, asked) if each.tokens > found]
        reply.elsewhere.extend(sorted(elsewhere, key=lambda each: (-each.tokens, len(each.differs)))[:MAX_ELSEWHERE])
    return reply


async def _elsewhere(hub: Hub, namespace: KnownNamespace, asked: Asked) -> AsyncIterator[pb.Elsewhere]:
    """Wherever the beginning of it is, but in the namespace and under the identity that were asked for."""
    for number, other in enumerate(hub.namespaces.of_tenant(namespace.tenant)):
        if number % NAMESPACES_PER_TURN == 0:
            await asyncio.sleep(0)
        for adapter, salt in asked.variants() if asked.token_ids else [(asked.adapter, asked.salt)]:
            mine = {**namespace.fields, "adapter": asked.adapter, "salt": asked.salt}
            theirs = {**other.fields, "adapter": adapter, "salt": salt}
            differs = {name: value for name, value in theirs.items() if mine.get(name) != value}
            whole = other.keep.kind is KeepKind.ALL  # else the first blocks may be gone, and the prefix is there all the same
            if not differs or (whole and not _leading(hub, other, await asked.chain(other, adapter, salt, 1))):
                continue
            blocks = _leading(hub, other, await asked.chain(other, adapter, salt))
            yield pb.Elsewhere(digest=other.digest, blocks=blocks, tokens=blocks * other.geometry.block_tokens, differs=differs)


def _leading(hub: Hub, namespace: KnownNamespace, hashes: bytes) -> int:
    """How many leading blocks are here."""
    if not hashes:
        return 0
    dram, *pools = hub.caches()
    found = dram.lookup(namespace.tenant, namespace.id, "", unpack_hashes(hashes), pools)
    return found.blocks if isinstance(found, Looked) else 0
