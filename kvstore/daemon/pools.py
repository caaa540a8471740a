"""The pools of GPU memory: each has a cache core of its own, whose only tier is that pool.

What such a core calls dram is shown as hbm. A session has the same id in every core; only dram's watches for silence. A pool's slots need
no marks, since no other daemon will have this memory. On the event loop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

import numpy as np

from kvstore import errors
from kvstore.cache.core import Cache, TierFigures
from kvstore.cache.messages import (
    UNIT_BYTES,
    Abandon,
    Attach,
    Decision,
    Granted,
    NamespaceSpec,
    Notice,
    NoticeKind,
    Refused,
    Release,
    Tier,
    pack_hashes,
    unpack_hashes,
)
from kvstore.cache.recovery import Cleared, Elsewhere
from kvstore.cache.state import CacheSizes, extent_bytes_for
from kvstore.daemon.wire import Input
from kvstore.tiers.hbm import HbmTier

GONE_S = 1.0  # seconds that a dead process's slots are kept: what it had queued on the GPU may end after its locks
# What a pool's core counts, by the name under which it is shown; the rest is shown of dram's alone.
SHOWN = {"committed": "committed_hbm", "evicted_dram": "evicted_hbm", "no_room": "no_room_hbm", "rules_broken": "rules_broken"}


@dataclass(frozen=True)
class Terms:
    """What a session wants of one pool; a limit of 0 is none."""

    guarantee_bytes: int
    limit_bytes: int


@dataclass
class GpuPool:
    """One GPU's pool. `number`: 1 and up, what operations name it by; `name`: what people call it."""

    number: int
    tier: HbmTier
    socket_path: Path
    cache: Cache
    lost: str = ""  # why nothing more is put in or found there
    left_out: dict[int, str] = field(default_factory=dict)  # namespaces whose blocks do not fit, and why

    @property
    def name(self) -> str:
        """hbm: and the GPU's number in this process."""
        return self.tier.label

    def open(self, namespace: int, spec: NamespaceSpec) -> None:
        """Open a namespace under the id that it has in dram's core."""
        answer = self.cache.open_namespace(spec)
        if isinstance(answer, Refused) and namespace not in self.left_out:
            self.left_out[namespace] = answer.text.replace("dram", self.name)
            # Something takes the id that has no blocks: nobody can name it, and a group's prefixes end before it.
            answer = self.cache.open_namespace(NamespaceSpec(spec.tenant, b"left out: %d" % namespace, 1, UNIT_BYTES, keep=spec.keep))
        if answer != namespace and namespace not in self.left_out:
            raise errors.InternalFault(f"namespace {namespace} is {answer} in {self.name}; please report it")

    def check(self, request: Input) -> None:
        """Raises for what cannot be done here."""
        if isinstance(request, Abandon | Release):
            return  # these work to the end
        if self.lost:
            raise errors.Unavailable(f"{self.name}: {self.lost}")
        if request.namespace in self.left_out:
            raise errors.LimitExceeded(self.left_out[request.namespace])


def core_of(tier: HbmTier, eviction: str, seed: int, max_sessions: int) -> Cache:
    """A core for a pool of that size. Nothing is checked there: bytes are when they come to dram."""
    extent_bytes = extent_bytes_for(tier.capacity_bytes)
    sizes = CacheSizes(tier.capacity_bytes, dram_extent_bytes=extent_bytes, eviction=eviction, seed=seed, max_sessions=max_sessions)
    cache = Cache(sizes)
    cache.dram_ready(tier.capacity_bytes // UNIT_BYTES)
    return cache


class Pools:
    """All of them. The hub calls every method; decisions of their cores are carried out here."""

    def __init__(self, pools: Iterable[GpuPool], granted: Callable[[int, Granted], None], publish: Callable[[Notice], None]) -> None:
        """`granted` takes a pool's number and a grant of its core; `publish` a notice for watchers."""
        self.all = {pool.number: pool for pool in pools}
        self.stored: Callable[[GpuPool, Notice], None] = lambda pool, notice: None  # who copies new blocks down is told of them
        self._granted = granted
        self._publish = publish
        self._leaving: deque[tuple[float, int]] = deque()  # when, and which session's holds end

    def open(self, namespace: int, spec: NamespaceSpec) -> None:
        """A namespace was opened in dram's core."""
        for pool in self.all.values():
            pool.open(namespace, spec)

    # ---- sessions

    def asked(self, wanted: Mapping[str, Terms]) -> dict[int, Terms]:
        """Which pools a client gets, of the GPUs that it named: by number."""
        return {pool.number: wanted[pool.tier.pool.uuid] for pool in self.all.values() if pool.tier.pool.uuid in wanted and not pool.lost}

    def attaches(self, request: Attach, terms: Mapping[int, Terms]) -> list[tuple[Cache, Attach]]:
        """What attaching in dram's core means in each pool: those asked for, and those where the session it resumes had holds."""
        found = []
        for pool in self.all.values():
            resume = request.resume if request.resume in pool.cache.state.sessions else 0
            asked = terms.get(pool.number, Terms(0, 0))
            if pool.number in terms or resume:
                each = replace(request, guarantee_bytes=asked.guarantee_bytes, limit_bytes=asked.limit_bytes, resume=resume, own=True)
                found.append((pool.cache, each))
        return found

    def of(self, session: int) -> list[Cache]:
        """The cores of the pools that a session has."""
        return [pool.cache for pool in self.all.values() if session in pool.cache.state.sessions]

    def core_for(self, number: int, session: int, request: Input) -> Cache:
        """Where an operation belongs. Raises InvalidArgument, LimitExceeded, Unavailable."""
        pool = self.all.get(number)
        if pool is None or session not in pool.cache.state.sessions:
            raise errors.InvalidArgument(f"pool {number} was not offered to this session; name its GPU in Hello, and see Welcome.pools")
        pool.check(request)
        return pool.cache

    def detach(self, session: int) -> None:
        """Its client has left the memory alone, and says so."""
        for pool in self.all.values():
            pool.cache.detach(session)

    def session_ended(self, session: int, reason: str) -> None:
        """It ended in dram's core."""
        for pool in self.all.values():
            pool.cache.session_lost(session, reason)

    def process_gone(self, session: int, now: float) -> None:
        """Its process is gone: its holds end when what it had queued on the GPU has, too."""
        if any(session in pool.cache.state.sessions for pool in self.all.values()):
            self._leaving.append((now + GONE_S, session))

    def collect(self, now: float) -> list[GpuPool]:
        """A few times a second; answers the pools whose GPU was lost since."""
        while self._leaving and self._leaving[0][0] <= now:
            _, session = self._leaving.popleft()
            for pool in self.all.values():
                pool.cache.process_gone(session)
        for pool in self.all.values():
            pool.cache.tick(now)
        lost = [pool for pool in self.all.values() if pool.tier.lost and not pool.lost]
        for pool in lost:
            self._lose(pool, f"its GPU failed: {pool.tier.lost}")
        return lost

    # ---- decisions

    def settle(self) -> bool:
        """Carry out what the cores have decided: grants, and notices as of hbm. There is nothing to mark, and no disk.

        Answers whether there was anything.
        """
        busy = False
        for pool in self.all.values():
            while decisions := pool.cache.drain():  # who is told of new blocks may take leases on them
                self._carry_out(pool, decisions)
                busy = True
        return busy

    def _carry_out(self, pool: GpuPool, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Granted):
                self._granted(pool.number, decision)
            elif isinstance(decision, Notice) and decision.kind is not NoticeKind.CLEARED:  # that one comes from dram's core
                self._tell(pool, decision)

    def _tell(self, pool: GpuPool, notice: Notice) -> None:
        if notice.kind is NoticeKind.STORED:
            self.stored(pool, notice)
        elif len(self.all) > 1:
            notice = self._gone(pool, notice)
        if notice.hashes:
            self._publish(replace(notice, tier=Tier.HBM))

    def _gone(self, pool: GpuPool, notice: Notice) -> Notice:
        """What has left hbm: no other pool has it. That it is in a second one may be told twice, and is true both times."""
        hashes = unpack_hashes(notice.hashes)
        elsewhere = np.zeros(len(hashes), bool)
        for other in self.all.values():
            if other is not pool:
                elsewhere |= other.cache.has(notice.namespace, hashes)
        parents = pack_hashes(unpack_hashes(notice.parents)[~elsewhere]) if notice.parents else b""
        return replace(notice, named=pack_hashes(hashes[~elsewhere]), below=parents)

    # ---- blocks

    def forget(self, namespace: int, block: bytes) -> None:
        """A block's bytes were found wrong elsewhere."""
        for pool in self.all.values():
            pool.cache.forget(namespace, unpack_hashes(block))

    def _lose(self, pool: GpuPool, why: str) -> None:
        """Nothing is found there any more. What is held stays, for what it is worth, with its holders."""
        pool.lost = why
        pool.cache.clear(0, tuple(range(1, len(pool.cache.state.namespaces))))

    def clear_pieces(self, namespaces: tuple[int, ...], dram: Cache) -> Iterator[Cleared]:
        """Remove all blocks of these namespaces, with other work between two pieces; `clear` must follow."""
        for pool in self.all.values():
            elsewhere, start = self._elsewhere(pool, dram), 1
            while start:
                cleared, start = pool.cache.clear_piece(namespaces, start, elsewhere)
                yield cleared

    def clear(self, namespaces: tuple[int, ...], dram: Cache) -> Cleared:
        """Remove all blocks of these namespaces. One that is in several tiers counts where it goes last."""
        removed = [pool.cache.clear(0, namespaces, self._elsewhere(pool, dram)) for pool in self.all.values()]
        return reduce(Cleared.and_also, removed, Cleared(0, 0, 0, 0))

    def _elsewhere(self, pool: GpuPool, dram: Cache) -> Elsewhere:
        others = [dram, *(other.cache for other in self.all.values() if other is not pool)]
        return lambda namespace, hashes: np.logical_or.reduce([cache.has(namespace, hashes) for cache in others])

    def snapshot(self, namespace: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """All blocks of a namespace, in pieces, perhaps some twice: (packed hashes, packed parents)."""
        for pool in self.all.values():
            for piece in pool.cache.snapshot(namespace):
                yield [(hashes, parents) for _, hashes, parents in piece]

    def caches(self) -> tuple[Cache, ...]:
        """Every core."""
        return tuple(pool.cache for pool in self.all.values())

    def figures(self) -> dict[str, TierFigures]:
        """Each pool's, by its name."""
        return {pool.name: figures for pool in self.all.values() for figures in pool.cache.stats().tiers.values()}

    def held_bytes(self, session: int) -> int:
        """What a session holds, over all pools."""
        found = (pool.cache.state.sessions.get(session) for pool in self.all.values())
        return sum(each.held_bytes for each in found if each is not None)

    def counters(self) -> Counter[str]:
        """What is counted, by the names under which it is shown."""
        found: Counter[str] = Counter()
        for cache in self.caches():
            found.update({shown: cache.state.counters[name] for name, shown in SHOWN.items()})
        return found
