"""What the scheduler's half of the vLLM connector knows of one request: its chain of hashes, its lease, how far it is stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore import hashing
from kvstore.clients.prefixes import PrefixLease
from kvstore.hashing import HASH_BYTES, ExtraPairs

MM_TAG = b"mm"  # the extra pair of a block that covers a part of an image, or of another input that is no token


@dataclass
class Tracked:
    """One request of vLLM's scheduler.

    root           the hash before the first block: model facts, adapter, salt, and which reset of the cache was the last
    hashes         packed, of the leading full blocks so far
    stored_blocks  leading blocks that are stored, or whose saves were sent
    adapter        its digest, "" for none; None where its weights are unknown
    lease          on the blocks from `first_block` on;  promised_from  the first that the scheduler was told of
    loading        engine blocks that a load is filling, by KV cache group
    held           engine blocks that windows may leave behind before they are stored, by group and number; held_until  so far
    no_loads       nothing more is asked of the store in this run of the request
    storing        False where its keys and values may be of mixed weights, or of unknown ones
    ended          the scheduler is done with it; only its load is still under way
    """

    request: Any
    root: bytes
    adapter: str | None
    block_tokens: int
    hashes: bytes = b""
    stored_blocks: int = 0
    lease: PrefixLease | None = None
    first_block: int = 0
    promised_from: int = 0
    asked_at: float | None = None
    loading: tuple[tuple[int, ...], ...] = ()
    held: dict[tuple[int, int], Any] = field(default_factory=dict)
    held_until: int = 0
    no_loads: bool = False
    storing: bool = True
    preemptions: int = 0
    ended: bool = False

    def hashes_of(self, blocks: int) -> bytes:
        """Packed hashes of its leading blocks; all their tokens must be known."""
        have = len(self.hashes) // HASH_BYTES
        if have < blocks:
            tokens = list(self.request.all_token_ids[have * self.block_tokens : blocks * self.block_tokens])
            extras = multimodal_extras(self.request.mm_features or (), have, blocks, self.block_tokens)
            self.hashes += hashing.block_hashes(self.parent_of(have), tokens, self.block_tokens, extras)
        return self.hashes[: blocks * HASH_BYTES]

    def parent_of(self, block: int) -> bytes:
        """The hash before block `block`, whose own parent's is known."""
        return self.hashes[(block - 1) * HASH_BYTES : block * HASH_BYTES] if block else self.root

    def usable_blocks(self) -> int:
        """How many leading blocks may come from the store: the last token is always computed."""
        return hashing.usable_blocks(self.request.num_tokens, self.block_tokens)

    def computed_blocks(self) -> int:
        """Leading full blocks that are computed, by every step whose result is known, from tokens that are accepted."""
        known = int(self.request.num_tokens) - 1  # the last token may be one that was only just sampled
        computed: int = min(self.request.num_computed_tokens - self.request.num_in_flight_tokens, known)
        return max(computed, 0) // self.block_tokens

    def left_s(self, timeout_s: float) -> float:
        """Seconds of `timeout_s` that are left since the store was first asked for it."""
        now = time.monotonic()
        self.asked_at = now if self.asked_at is None else self.asked_at
        return self.asked_at + timeout_s - now

    def drop_lease(self) -> None:
        """Give its lease back, where it has one."""
        if self.lease is not None:
            self.lease.release()
        self.lease = None

    def start_over(self, root: bytes) -> None:
        """It was preempted: its blocks are gone, and what it computes from now on is of the present weights."""
        if self.root != root:
            self.root, self.hashes = root, b""
            self.storing = self.adapter is not None
        self.preemptions = self.request.num_preemptions
        self.stored_blocks = self.held_until = 0
        self.asked_at = None
        self.no_loads = self.adapter is None
        self.drop_lease()


def multimodal_extras(features: Sequence[Any], first: int, end: int, block_tokens: int) -> dict[int, ExtraPairs]:
    """Extra pairs of blocks `first` .. `end`, counted from `first`: what inputs that are no tokens lie in each, and where.

    features   vLLM's: `identifier` names the content, `mm_position.offset` and `.length` its placeholder tokens
    """
    extras: dict[int, list[tuple[bytes, bytes]]] = {}
    for feature in features:
        offset, length = int(feature.mm_position.offset), int(feature.mm_position.length)
        begin = max(offset // block_tokens, first)
        for block in range(begin, min(-(-(offset + length) // block_tokens), end)):
            place = offset - block * block_tokens
            extras.setdefault(block - first, []).append((MM_TAG, f"{place}:{feature.identifier}".encode()))
    return {block: tuple(pairs) for block, pairs in extras.items()}
