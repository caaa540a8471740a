"""What the scheduler's half of the vLLM connector asks of the store, and promises to the scheduler for each request.

Called by the scheduler's thread alone. Nothing here waits: leases are submitted and polled, adapters are hashed by another thread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore import hashing
from kvstore.clients import requests
from kvstore.clients.prefixes import HOLE, Prefixes, PrefixLease
from kvstore.clients.vllm_adapters import Adapters
from kvstore.clients.vllm_facts import members_of
from kvstore.clients.vllm_plan import NO_BLOCK, ArenaPlace, GroupFacts, LoadJob, WorkerFacts
from kvstore.clients.vllm_requests import Tracked
from kvstore.clients.vllm_residency import Member
from kvstore.clients.vllm_settings import Settings
from kvstore.hashing import HASH_BYTES, Identity
from kvstore.proto import kvstore_pb2 as pb

if TYPE_CHECKING:
    from kvstore.clients.vllm_events import Events
    from kvstore.clients.vllm_holds import Holds

MAX_LEASES = 256  # leases: requests that were looked at and do not run yet; more would hold memory that running ones need
NOTHING = (0, False)
LATER = (None, False)

log = logging.getLogger("kvstore.vllm")


class Lookups:
    """See the module's text. `tracked` has every request that the store was asked for, by vLLM's id, until it ends."""

    def __init__(self, place: str, identity: Identity, settings: Settings, holds: Holds, events: Events | None = None) -> None:
        self._holds = holds
        self._place, self._identity, self._settings, self._events = place, identity, settings, events
        self._facts: list[WorkerFacts] = []
        self._prefixes: Prefixes | None = None  # made with the first request: grpc does not survive a fork
        self._adapters = Adapters()
        self.tracked: dict[str, Tracked] = {}
        self.loads: list[LoadJob] = []  # promised since they were last taken away
        self.restarted: set[str] = set()  # requests that were preempted and begin again, since it was last emptied
        self.put_off = False  # a request was put off since this was last reset
        self.generation = ""  # of the weights, a new one with each reset

    def introduce(self, facts: Iterable[WorkerFacts]) -> None:
        """What the workers' tensors are, in the order of their ranks. Before it is known nothing is found."""
        self._facts = list(facts)
        if refusal := next((each.refusal for each in self._facts if each.refusal), ""):
            log.warning("the store is not used: %s", refusal)
            self._facts = []
        self._holds.introduce((at for at, group in enumerate(self.groups) if group.window_tokens), len(self._facts))
        self._tell_of()

    def matched(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens past `computed_tokens` the store will load, asynchronously; LATER: not known yet, ask again."""
        prefixes = self._open()
        if prefixes is None or not _named_by_tokens(request):
            return NOTHING
        tracked = self._track(request)
        if tracked is None:
            return self._later()
        if request.num_preemptions != tracked.preemptions:
            self._holds.drop(tracked)
            tracked.start_over(self._root(request, tracked.adapter))
            self.restarted.add(request.request_id)
        block_tokens = tracked.block_tokens
        if getattr(request, "skip_reading_prefix_cache", False) or tracked.no_loads or computed_tokens % block_tokens:
            tracked.drop_lease()
            return NOTHING
        have = computed_tokens // block_tokens
        found = self._found(prefixes, tracked, have)
        if found is None:
            return self._later()
        if found < max(self._settings.min_blocks, 1):
            tracked.drop_lease()
            tracked.no_loads = True  # asked and answered, for this run of the request
            return NOTHING
        tracked.promised_from = have
        return found * block_tokens, True

    def allocated(self, request: Any, tables: Sequence[Sequence[Any]], external_tokens: int) -> None:
        """The scheduler has given the request blocks, and takes the promise of so many tokens; none: it only tells.

        tables   vLLM's KVCacheBlocks of the request, by KV cache group
        """
        tracked = self.tracked.get(request.request_id)
        if tracked is None or tracked.lease is None or external_tokens == 0:
            return
        begin, count = tracked.promised_from, external_tokens // tracked.block_tokens
        skip = begin - tracked.first_block
        units = tuple(member[skip : skip + count] for member in tracked.lease.units)
        arena = tracked.lease.arena
        place = ArenaPlace(arena.path, arena.inode[2] - len(arena.readable), len(arena.readable), arena.inode)
        tracked.loading = tuple(_ids_of(table[begin : begin + count]) for table in tables)
        self.loads.append(LoadJob(request.request_id, place, units, tracked.loading))
        if self._events is not None:
            hashes = tracked.hashes_of(begin + count)[begin * HASH_BYTES :]
            self._events.used(request, begin, hashes, tracked.block_tokens, leased=True)

    def failed(self, bad_blocks: set[int]) -> None:
        """These engine blocks were not filled: their requests compute the rest, as what failed once would fail again."""
        for tracked in self.tracked.values():
            if any(bad_blocks.intersection(group) for group in tracked.loading):
                tracked.no_loads = True

    def failed_whole(self, request_id: str) -> None:
        """The request's load has failed, and it begins again without one."""
        if request_id in self.tracked:
            self.tracked[request_id].no_loads = True

    def loaded(self, request_id: str) -> None:
        """A load has ended in every worker: its lease goes back."""
        tracked = self.tracked.get(request_id)
        if tracked is None:
            return
        if not tracked.no_loads and tracked.promised_from == 0:
            tracked.stored_blocks = max(tracked.stored_blocks, len(tracked.loading[0]))
        tracked.loading = ()
        tracked.drop_lease()
        if tracked.ended:
            del self.tracked[request_id]

    def new_generation(self, generation: str) -> None:
        """The weights may have changed: other chains from now on, and what runs now stores no more."""
        self.generation = generation
        for tracked in self.tracked.values():
            tracked.storing = False
            self._holds.drop(tracked)
            if not tracked.loading:
                tracked.drop_lease()
                tracked.no_loads = True
        if self._events is not None:
            self._events.forget()

    def close(self) -> None:
        """Give everything back."""
        for tracked in self.tracked.values():
            tracked.drop_lease()
        self.tracked.clear()
        if self._prefixes is not None:
            self._prefixes.close()

    # ----

    def _found(self, prefixes: Prefixes, tracked: Tracked, have: int) -> int | None:
        """Blocks past the engine's own `have` that are leased; None while it is not decided."""
        wanted = tracked.usable_blocks()
        if wanted <= have:
            return 0
        if tracked.lease is not None and tracked.first_block > have:
            tracked.drop_lease()  # blocks that the engine had are gone meanwhile: ask from there on
        if tracked.lease is None:
            left_s = tracked.left_s(self._settings.acquire_timeout_s)
            if left_s <= 0:
                return 0
            if sum(each.lease is not None for each in self.tracked.values()) >= MAX_LEASES:
                return None
            tracked.lease = prefixes.begin(tracked.hashes_of(wanted)[have * HASH_BYTES :], left_s)
            tracked.first_block = have
            if tracked.lease is None:
                return None if prefixes.connecting else 0
        if not tracked.lease.poll():
            return None
        return min(tracked.first_block + self._reach(tracked.lease), wanted) - have

    def _reach(self, lease: PrefixLease) -> int:
        """Leading blocks of a lease that can be used: all, or none where its deadline cut it short of what a window looks at."""
        for at, units in enumerate(lease.units):
            window = self.groups[at % len(self.groups)].window_blocks
            if window and HOLE in units[-window:]:
                return 0
        return lease.blocks

    def _track(self, request: Any) -> Tracked | None:
        """The request's record, made where it is new; None while its adapter is being hashed."""
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            adapter = self._adapters.digest(request.lora_request, self._settings.acquire_timeout_s)
            if adapter is None:
                return None
            digest = adapter.digest if adapter.known else None
            tracked = Tracked(request, self._root(request, digest), digest, self.groups[0].block_tokens)
            tracked.preemptions = request.num_preemptions
            tracked.storing, tracked.no_loads = adapter.known, not adapter.known
            self.tracked[request.request_id] = tracked
        return tracked

    def _root(self, request: Any, adapter: str | None) -> bytes:
        salt = request.cache_salt or ""
        if self.generation:
            salt = json.dumps([self.generation, salt])
        return hashing.fingerprint(replace(self._identity, adapter=adapter or "", salt=salt))

    def _later(self) -> tuple[int | None, bool]:
        self.put_off = True
        return LATER

    def _open(self) -> Prefixes | None:
        if self._prefixes is None and self._facts:
            self._prefixes = Prefixes(self._place, [_opening(each) for each in self._members()], "vllm")
        return self._prefixes

    @property
    def shards(self) -> tuple[str, ...]:
        """Of the workers, each once: those of one shard hold the same bytes."""
        return tuple(dict.fromkeys(each.shard for each in self._facts))

    @property
    def groups(self) -> tuple[GroupFacts, ...]:
        """The KV cache groups, as the first worker has them."""
        return self._facts[0].groups if self._facts else ()

    def _members(self) -> list[Member]:
        return members_of(self._identity, self._facts)

    def _tell_of(self) -> None:
        """Routers are told of the present namespaces, of layers that see all tokens where there are some."""
        if self._events is not None and self._facts:
            told = next((at for at, group in enumerate(self.groups) if not group.window_tokens), 0)
            self._events.open(self._members()[told :: len(self.groups)], told)


def _opening(member: Member) -> pb.OpenNamespaceRequest:
    return requests.open_namespace(member.identity, member.geometry, member.shard, member.kv_group, member.keep)


def _ids_of(table: Iterable[Any]) -> tuple[int, ...]:
    return tuple(NO_BLOCK if block.is_null else int(block.block_id) for block in table)


def _named_by_tokens(request: Any) -> bool:
    """Whether token ids, adapter, salt and multimodal content say all that the request's keys and values depend on."""
    return request.prompt_token_ids is not None and getattr(request, "prompt_embeds", None) is None
