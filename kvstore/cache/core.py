"""The façade of the cache core: one method an input, each at once. After one or several calls, `drain` gives the decisions to carry out.

One event loop owns a Cache; nothing here blocks, waits, or reads a clock: `now` is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.cache import (
    checking,
    claims,
    completions,
    demoting,
    explaining,
    finding,
    hints,
    invariants,
    reading,
    recovery,
    sessions,
    singles,
    writing,
)
from kvstore.cache.eviction.base import PolicyMaker
from kvstore.cache.leaving import remove
from kvstore.cache.messages import (
    Abandon,
    Acquire,
    Acquired,
    Attach,
    Claim,
    Claimed,
    Commit,
    Committed,
    Decision,
    Done,
    Hashes,
    Looked,
    NamespaceSpec,
    Recovered,
    Refused,
    Release,
    Reserve,
    Reserved,
    StartVerify,
    StartWrite,
    Tier,
    Tokens,
    TransferDone,
    Units,
    pack_hashes,
)
from kvstore.cache.recovery import Cleared
from kvstore.cache.singles import CommitEach, ReleaseEach, ReserveEach
from kvstore.cache.slots import SlotState
from kvstore.cache.state import CacheSizes, State

CHECKED_BLOCKS = 4096  # blocks: a rule over so many takes some 10 ms
SNAPSHOT_ROWS = 8192  # rows that a piece of a snapshot goes over: 512 KiB of hashes and parents where all are blocks


@dataclass(frozen=True)
class TierFigures:
    capacity_bytes: int
    class_bytes: dict[str, int]  # by SlotState, lower case; adds up to capacity_bytes
    blocks: int
    held_bytes: int


@dataclass(frozen=True)
class SessionFigures:
    session: int
    tenant: str
    held_bytes: int
    leases: int
    reserved_slots: int
    ended: bool


@dataclass(frozen=True)
class CacheStats:
    tiers: dict[Tier, TierFigures]
    sessions: tuple[SessionFigures, ...]
    index_capacity_blocks: int
    index_used_blocks: int
    waiting_writes: int
    transfers: int
    counters: dict[str, int]
    scrub_passes: int = 0
    scrub_pass_s: float = 0.0  # what the last whole pass of the background check took
    tail_blocks: int = 0  # blocks whose token ids are kept, in namespaces with tails
    tail_bytes: int = 0  # what these ids take
    tail_capacity_bytes: int = 0  # what they may take


class Cache:
    """Blocks, slots, leases and transfers of one daemon (or of one worker's own arena)."""

    def __init__(self, sizes: CacheSizes, make_policy: PolicyMaker | None = None) -> None:
        """`make_policy`: who is evicted, in place of `sizes.eviction`; for a simulation."""
        self.state = State(sizes, make_policy)
        self._ticked_at: float | None = None
        self._checked = 0

    # ---- namespaces, groups, sessions

    def open_namespace(self, spec: NamespaceSpec) -> int | Refused:
        """The namespace's id in this run, 1 and up."""
        return sessions.open_namespace(self.state, spec)

    def refuses_group(self, session: int, name: str, namespaces: tuple[int, ...]) -> Refused | None:
        return sessions.refuses_group(self.state, session, name, namespaces)

    def join_group(self, session: int, name: str, namespaces: tuple[int, ...]) -> Done | Refused:
        return sessions.join_group(self.state, session, name, namespaces)

    def attach(self, request: Attach, now: float) -> Done | Refused:
        self._at(now)
        return sessions.attach(self.state, request)

    def refuses(self, request: Attach) -> Refused | None:
        """Why `attach` would refuse, if it would: for who attaches in several cores, or in none."""
        return sessions.refuses(self.state, request)

    def heard(self, session: int, now: float) -> None:
        """A sign of life from a session."""
        self._at(now)
        if known := self.state.sessions.get(session):
            known.heard_at = max(known.heard_at, now)

    def detach(self, session: int) -> Done | Refused:
        return sessions.detach(self.state, session)

    def session_lost(self, session: int, reason: str) -> None:
        sessions.session_lost(self.state, session, reason)

    def process_gone(self, session: int) -> None:
        sessions.process_gone(self.state, session)

    # ---- operations

    def acquire(self, request: Acquire, now: float) -> Acquired | Refused:
        self._at(now)
        return reading.acquire(self.state, request)

    def claim(self, request: Claim) -> Claimed | Refused:
        return claims.claim(self.state, request)

    def release(self, request: Release) -> Done | Refused:
        return claims.release(self.state, request)

    def reserve(self, request: Reserve) -> Reserved | Refused:
        self._next_operation()
        return writing.reserve(self.state, request)

    def commit(self, request: Commit) -> Committed | Refused:
        self._next_operation()
        return writing.commit(self.state, request)

    def abandon(self, request: Abandon) -> Done | Refused:
        return writing.abandon(self.state, request)

    def reserve_each(self, request: ReserveEach) -> tuple[Units, Units] | None:
        """(units, generations) of the first reservations that got a slot, the others having failed; None: do them one by one."""
        self._next_operation()
        return singles.reserve_each(self.state, request)

    def commit_each(self, request: CommitEach) -> bool | None:
        """True where all are stored; None, with nothing done: do them one by one."""
        return singles.commit_each(self.state, request)

    def release_each(self, request: ReleaseEach) -> list[int] | None:
        """How many blocks each lease had; None, with nothing done: do them one by one."""
        return singles.release_each(self.state, request)

    def lookup(self, tenant: str, namespace: int, group: str, hashes: Hashes, pools: Iterable[Cache] = ()) -> Looked | Refused:
        """Pure: no lease, no recency, no movement. `pools`: the cores of GPUs' pools, which count as hbm."""
        return finding.lookup(self.state, tenant, namespace, group, hashes, [pool.state for pool in pools])

    def leading(self, tenant: str, namespace: int, hashes: bytes) -> bytes | Refused:
        """`lookup` in one namespace, of packed hashes, where there are no pools: the tier of each leading block that is here."""
        return finding.leading(self.state, tenant, namespace, hashes)

    def prefetch(self, namespace: int, hashes: Hashes, deadline_at: float) -> tuple[int, int]:
        """Answers (started, already in dram)."""
        self._next_operation()
        return hints.prefetch(self.state, namespace, hashes, deadline_at)

    def pin(self, namespace: int, hashes: Hashes) -> NDArray[np.bool_]:
        """Which blocks were not pinned before. [n]"""
        return hints.pin(self.state, namespace, hashes, on=True)

    def unpin(self, namespace: int, hashes: Hashes) -> NDArray[np.bool_]:
        """Which blocks were. [n]"""
        return hints.pin(self.state, namespace, hashes, on=False)

    def has(self, namespace: int, hashes: Hashes) -> NDArray[np.bool_]:
        """Which blocks are in some tier. [n]"""
        return finding.present_in(self.state, self.state.index.find(namespace, hashes))

    def why_missing(self, namespace: int, hashes: Hashes, first: int) -> explaining.Reason:
        """Why block `first` of a chain is not here."""
        return explaining.why_missing(self.state, namespace, hashes, first)

    def census(self) -> Iterator[dict[Tier, NDArray[np.int64]]]:
        """Blocks of each namespace in each tier, in pieces to be added up. See `explaining.census`."""
        return explaining.census(self.state)

    def units(self, namespace: int, hashes: Hashes) -> NDArray[np.int64]:
        """Where each block lies in dram, in units; -1 where it is not there. [n]"""
        rows = self.state.index.find(namespace, hashes)
        slots = self.state.index.slot[Tier.DRAM][rows]
        return np.where((rows > 0) & (slots > 0), self.state.dram.units[slots].astype(np.int64), -1)

    def tokens(self, namespace: int, hashes: Hashes) -> Tokens | None:
        """The token ids of these blocks, one after another; None unless they are kept of all."""
        kept, spec = self.state.index.tokens, self.state.spec(namespace)
        rows = self.state.index.find(namespace, hashes).tolist()
        if kept is None or not spec.tails or not all(row and kept.first_at[row] for row in rows):
            return None
        return np.concatenate([kept.tokens_of(row, spec.block_tokens) for row in rows])

    def forget(self, namespace: int, hashes: Hashes) -> None:
        """Take blocks out of every tier by force; whoever holds one keeps its slot."""
        for row in self.state.index.find(namespace, hashes).tolist():
            if row and self.state.index.stored(row):
                remove(self.state, row)

    def clear(self, clear_id: int, namespaces: tuple[int, ...], elsewhere: recovery.Elsewhere | None = None) -> Cleared:
        return recovery.clear(self.state, clear_id, namespaces, elsewhere)

    def clear_piece(self, namespaces: tuple[int, ...], start: int, elsewhere: recovery.Elsewhere | None = None) -> tuple[Cleared, int]:
        """See `recovery.clear_piece`."""
        return recovery.clear_piece(self.state, namespaces, start, elsewhere)

    # ---- the mover and the clock

    def transfer_done(self, report: TransferDone, now: float) -> None:
        self._at(now)
        completions.transfer_done(self.state, report)

    def next_writes(self, limit: int) -> list[StartWrite]:
        """Blocks to copy down now; call when the mover has room. Drain afterwards."""
        return demoting.next_writes(self.state, limit)

    def next_sums(self, limit_bytes: int) -> list[StartVerify]:
        """With verify = read: blocks whose first checksum is to be taken now, about so many bytes; call when the mover has room."""
        return checking.next_sums(self.state, limit_bytes)

    def next_scrubs(self, limit_bytes: int) -> list[StartVerify]:
        """Blocks to look at in the background, about so many bytes; call when there is nothing else to do."""
        return checking.next_scrubs(self.state, limit_bytes)

    def tick(self, now: float) -> None:
        """Deadlines, silence, second tries. About ten times a second."""
        self._at(now)
        previous, self._ticked_at = self._ticked_at, now
        sessions.hush(self.state, now if previous is None else previous)
        reading.expire(self.state)
        completions.retry_deletes(self.state)

    def drain(self) -> list[Decision]:
        """All decisions since the last drain, in the order in which to carry them out."""
        reading.settle_leases(self.state)
        return self.state.take_decisions()

    def dram_ready(self, units: int) -> None:
        """Memory up to here has been touched and may be granted."""
        self.state.dram.ready_units = min(units, self.state.dram.capacity_units)

    # ---- start and sight

    def recover(self, found: Recovered) -> int:
        """Take over what an nvme directory holds; its namespaces are open already. Answers the blocks."""
        return recovery.recover(self.state, found)

    def survivors(self, units: Units, extent_slot_units: NDArray[np.int32]) -> int:
        return recovery.survivors(self.state, units, extent_slot_units)

    def survivors_gone(self, units: Units) -> None:
        recovery.survivors_gone(self.state, units)

    def snapshot(self, namespace: int) -> Iterator[list[tuple[Tier, bytes, bytes]]]:
        """All blocks of a namespace, in pieces, some of them empty; in each, by tier: (tier, packed hashes, packed parents).

        Between two pieces the cache may change: each is true when it is taken, and notices say what changed since the first.
        """
        index, start = self.state.index, 1
        while start:
            rows = index.rows(start, start + SNAPSHOT_ROWS)
            rows = rows[index.namespace[rows] == namespace]
            within = {tier: rows[index.slot[tier][rows] > 0] for tier in index.tiers}
            packed = [(tier, pack_hashes(index.hash[here]), pack_hashes(index.hash[index.parent[here]])) for tier, here in within.items()]
            yield [each for each in packed if each[1]]
            start = index.next_rows(start + SNAPSHOT_ROWS)

    def stats(self) -> CacheStats:
        state, tokens = self.state, self.state.index.tokens
        tiers = {
            tier: TierFigures(table.capacity_bytes, {s.name.lower(): table.bytes_in[s] for s in SlotState}, table.blocks, table.held_bytes)
            for tier, table in state.tables.items()
        }
        figures = tuple(
            SessionFigures(s.id, s.tenant, s.held_bytes, len(s.leases), len(s.reserved), s.ended) for s in state.sessions.values()
        )
        return CacheStats(
            tiers,
            figures,
            state.index.capacity,
            state.index.used,
            len(state.to_write),
            len(state.transfers),
            dict(state.counters),
            state.scrub.passes,
            state.scrub.last_pass_s,
            *((tokens.blocks, tokens.used_bytes, tokens.capacity_bytes) if tokens else ()),
        )

    def check(self) -> list[str]:
        """One of the rules, the next at each call, by brute force: for idle moments. Counts and returns what is broken.

        Nothing where the cache is too large for the event loop to wait: the property test and the simulation do the rest.
        """
        if self.state.index.used > CHECKED_BLOCKS:
            return []
        self._checked = (self._checked + 1) % len(invariants.RULES)
        broken = invariants.check(self.state, invariants.RULES[self._checked])
        self.state.counters["rules_broken"] += len(broken)
        return broken

    def _at(self, now: float) -> None:
        self.state.now = max(self.state.now, now)
        self._ticked_at = now if self._ticked_at is None else self._ticked_at  # the wait for the first tick may be a long one too
        self._next_operation()

    def _next_operation(self) -> None:
        for policy in self.state.policies.values():
            policy.advance()
