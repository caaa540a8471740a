"""KV events in vLLM's own form, for routers: which blocks that this engine has used the store has, in memory (CPU) or on disk (STORAGE).

A block is told of with vLLM's hash, parent and tokens, so that it joins what the engine says of its own cache. Only blocks that this
engine stored or loaded are known by their tokens; what other engines stored they tell themselves. Called by the scheduler's thread.
"""

from __future__ import annotations

import array
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, resolve_block_hashes, to_event_extra_keys

from kvstore.clients.vllm_residency import Change, Member, Residency
from kvstore.hashing import HASH_BYTES

MAX_BLOCKS = 65_536  # blocks that are told of, about 1 KiB each; past it those used longest ago are said to be gone
SOON_S = 0.5  # seconds in which a block that was just stored is heard of; an engine that rests takes steps so long, to tell of it
MEDIA = {"dram": MEDIUM_CPU, "nvme": MEDIUM_STORAGE}
OWNER, LOCALITY = "kvstore", "LOCAL"


@dataclass(frozen=True)
class _Described:
    """A block as vLLM names it; `number` its place in its sequence, `tokens` packed, 4 bytes each."""

    number: int
    hash: bytes
    parent: bytes | None
    tokens: bytes
    extra_keys: tuple[Any, ...] | None
    lora: tuple[int, str] | None


class Events:
    """See the module's text. `manager` is vLLM's KVCacheManager."""

    def __init__(self, place: str, most_blocks: int = MAX_BLOCKS) -> None:
        self._place, self._most_blocks = place, most_blocks
        self._described: OrderedDict[bytes, _Described] = OrderedDict()  # by the store's hash; those used longest ago first
        self._residency: Residency | None = None
        self._ready: list[KVCacheEvent] = []
        self._awaited: dict[bytes, float] = {}  # blocks on their way into the store, and until when they are waited for
        self.manager: Any = None
        self._group = 0

    def open(self, members: Sequence[Member], group: int) -> None:
        """Listen to these namespaces, of one KV cache group; of what was told before everything is gone."""
        self._group = group
        self.forget()
        if self._residency is not None:
            self._residency.stop()
        self._residency = Residency(self._place, members)

    def forget(self) -> None:
        """Of what was told so far everything is gone."""
        for block in list(self._described):
            self._forget(block)
        self._awaited.clear()

    def used(self, request: Any, first: int, hashes: bytes, block_tokens: int, *, leased: bool) -> None:
        """Blocks of a request from its `first` on, by the store's packed hashes: about to be stored, or `leased` to be loaded."""
        if self._residency is None:
            return
        blocks = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
        named = resolve_block_hashes(request.block_hashes, self.manager.block_pool.hash_block_size, block_tokens)
        for number, block in enumerate(blocks, first):
            self._described[block] = _described(request, number, block_tokens, named)
            self._described.move_to_end(block)
            if not leased:
                self._awaited[block] = time.monotonic() + SOON_S
        self._residency.follow(blocks, leased=leased)
        while len(self._described) > self._most_blocks:
            self._forget(next(iter(self._described)))

    @property
    def awaited(self) -> bool:
        """Blocks that were just stored were not heard of yet."""
        if self._residency is None or not self._awaited:
            return False
        now, residency = time.monotonic(), self._residency
        self._awaited = {block: until for block, until in self._awaited.items() if now < until and not residency.is_somewhere(block)}
        return bool(self._awaited)

    def take(self) -> list[KVCacheEvent]:
        """What came and went since this was last called."""
        events, self._ready = self._ready, []
        if self._residency is None:
            return events
        changes = [change for change in self._residency.changes() if change.tier in MEDIA]
        changes.sort(key=lambda change: self._described[change.block].number)
        events.extend(self._removed(change.block, change.tier) for change in reversed(changes) if not change.here)
        for tier, medium in MEDIA.items():
            events.extend(self._stored(medium, [change for change in changes if change.here and change.tier == tier]))
        return events

    def close(self) -> None:
        """End the threads."""
        if self._residency is not None:
            self._residency.close()

    # ----

    def _forget(self, block: bytes) -> None:
        assert self._residency is not None
        self._ready.extend(self._removed(block, tier) for tier in sorted(self._residency.forget(block)) if tier in MEDIA)
        del self._described[block]

    def _removed(self, block: bytes, tier: str) -> BlockRemoved:
        name = maybe_convert_block_hash(self._described[block].hash)
        return BlockRemoved(block_hashes=[name], medium=MEDIA[tier], group_idx=self._group, locality=LOCALITY, ownership=OWNER)

    def _stored(self, medium: str, changes: Iterable[Change]) -> Iterable[BlockStored]:
        """One event for each run of blocks that follow each other, parents before their children. `changes` by number."""
        runs: list[list[_Described]] = []
        by_last: dict[bytes, list[_Described]] = {}
        for change in changes:
            block = self._described[change.block]
            run = by_last.pop(block.parent, None) if block.parent else None
            if run is None:
                run = []
                runs.append(run)
            run.append(block)
            by_last[block.hash] = run
        return [self._event(medium, run) for run in runs]

    def _event(self, medium: str, run: Sequence[_Described]) -> BlockStored:
        first, spec = run[0], self.manager.kv_cache_event_metadata[self._group]
        tokens = array.array("I", b"".join(block.tokens for block in run)).tolist()
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block.hash) for block in run],
            parent_block_hash=None if first.parent is None else maybe_convert_block_hash(first.parent),
            token_ids=tokens,
            block_size=len(tokens) // len(run),
            lora_id=first.lora[0] if first.lora else None,
            medium=medium,
            lora_name=first.lora[1] if first.lora else None,
            extra_keys=to_event_extra_keys([block.extra_keys for block in run]),
            group_idx=self._group,
            kv_cache_spec_kind=spec[0],
            kv_cache_spec_sliding_window=spec[1],
            locality=LOCALITY,
            ownership=OWNER,
        )


def _described(request: Any, number: int, block_tokens: int, named: Sequence[bytes]) -> _Described:
    start, end = number * block_tokens, (number + 1) * block_tokens
    lora = request.lora_request
    return _Described(
        number=number,
        hash=bytes(named[number]),
        parent=bytes(named[number - 1]) if number else None,
        tokens=array.array("I", request.all_token_ids[start:end]).tobytes(),
        extra_keys=generate_block_hash_extra_keys(request, start, end, 0)[0],
        lora=(lora.adapter_id, lora.name) if lora else None,
    )
