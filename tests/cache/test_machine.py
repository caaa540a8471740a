"""Random sequences of every operation on a cache of a few slots, against a naive world; all rules are checked after each step."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.cache.core import Cache
from kvstore.cache.invariants import violations
from kvstore.cache.messages import Abandon, Acquire, Claim, Commit, Refused, Release, Tier, TransferResult, Units
from kvstore.cache.recovery import clear_piece
from tests.cache.prompts import acquire_on
from tests.cache.world import BLOCK_TOKENS, ROOT, TAILS, UNIT, Client, Path, World, chain, pack, sizes, tokens_of

EXAMPLES = int(os.environ.get("KVSTORE_MACHINE_EXAMPLES", "2000"))  # sequences; the number that CI runs

paths = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
seeds = st.integers(0, 1 << 30)
VERIFY = ["transfer", "read"]
namespaces = st.sampled_from([1, 1, 2, 3])


class CacheMachine(RuleBasedStateMachine):
    eviction = "lru"
    compiled = True

    @initialize(write=st.sampled_from(["through", "through", "on_evict", "off"]), nvme=st.booleans(), verify=st.sampled_from(VERIFY))
    def build(self, write: str, nvme: bool, verify: str) -> None:
        changes = {"nvme_write": write, "verify": verify, "eviction": self.eviction} | ({} if nvme else {"nvme_bytes": 0})
        self.world = World(Cache(sizes(**changes)))
        self.cache = self.world.cache
        if not self.compiled:
            self.cache.state.index.native = None
        self.world.attach(0, 0, 0)

    def _client(self, seed: int) -> Client | None:
        live = [client for client in self.world.clients.values() if not client.ended]
        return live[seed % len(live)] if live else None

    @invariant()
    def all_rules_hold(self) -> None:
        if hasattr(self, "world"):
            self.world.step()

    # ---- sessions

    @rule(guarantee=st.sampled_from([0, 0, 2, 4]), limit=st.sampled_from([0, 0, 3, 8]))
    @precondition(lambda self: len(self.world.clients) < 4)
    def attach(self, guarantee: int, limit: int) -> None:
        self.world.attach(guarantee, max(limit, guarantee) if limit else 0, 0)

    @rule(seed=seeds)
    def detach(self, seed: int) -> None:
        if (client := self._client(seed)) and seed % 4 == 0:
            self.cache.detach(client.session)
            self.world.clients[client.session].ended = True
            self.world.clients[client.session].leases.clear()

    @rule(seed=seeds)
    def lose(self, seed: int) -> None:
        if (client := self._client(seed)) and seed % 2 == 0:
            self.cache.session_lost(client.session, "test")
            client.asked.clear()

    @rule(seed=seeds, gone=st.booleans())
    def after_the_end(self, seed: int, gone: bool) -> None:
        ended = [client for client in self.world.clients.values() if client.ended]
        if not ended:
            return
        client = ended[seed % len(ended)]
        if gone:
            self.cache.process_gone(client.session)
            del self.world.clients[client.session]
        else:
            self.world.attach(0, 0, client.session)

    @rule(seed=seeds)
    def join(self, seed: int) -> None:
        if client := self._client(seed):
            self.cache.join_group(client.session, "model", (1, 3))

    # ---- writing

    @rule(seed=seeds, namespace=namespaces, count=st.integers(1, 4))
    def reserve(self, seed: int, namespace: int, count: int) -> None:
        if client := self._client(seed):
            self.world.reserve(client, namespace, [], count)

    @rule(seed=seeds, namespace=namespaces, path=paths)
    def reserve_named(self, seed: int, namespace: int, path: Path) -> None:
        if client := self._client(seed):
            self.world.reserve(client, namespace, chain(path), 0)

    @rule(seed=seeds, path=paths, lease=st.integers(1, 6), named=st.booleans())
    def commit(self, seed: int, path: Path, lease: int, named: bool) -> None:
        client = self._client(seed)
        if client is None or not client.reserved or lease in client.asked:
            return
        slots = list(client.reserved)
        first = seed % len(slots)
        if named:  # in the order in which they were reserved for a chain
            keys = {key: slot for slot, key in client.reserved.items() if key}
            mine = [keys[key] for key in chain(path) if key in keys]
            slots, first = (mine, 0) if mine else (slots, first)
        self.world.commit(client, slots[first:], path, lease, bare=seed % 3 == 0)

    @rule(seed=seeds, path=paths, lease=st.integers(1, 6), place=st.integers(0, BLOCK_TOKENS - 1))
    def lie(self, seed: int, path: Path, lease: int, place: int) -> None:
        """One token is not the block's."""
        client = self._client(seed)
        mine = [slot for slot, namespace in client.reserved_in.items() if namespace == TAILS] if client else []
        if client is None or not mine:
            return
        tokens = np.array(tokens_of(path[:1]), np.uint32)
        tokens[place] += 1
        units, generations = (pack_one(value) for value in mine[0])
        before = self.cache.stats()
        request = Commit(client.session, lease, TAILS, units, generations, pack(chain(path[:1])), pack([ROOT]), tokens=tokens)
        assert isinstance(self.cache.commit(request), Refused)
        after = self.cache.stats()
        assert (before.tiers, before.tail_blocks, before.sessions) == (after.tiers, after.tail_blocks, after.sessions)

    @rule(seed=seeds, namespace=namespaces, path=paths, lease=st.integers(1, 6), keep=st.booleans())
    def put(self, seed: int, namespace: int, path: Path, lease: int, keep: bool) -> None:
        """What a client does in one go: slots, bytes, commit, and mostly release."""
        client = self._client(seed)
        if client is None or lease in client.leases or lease in client.asked:
            return
        before = set(client.reserved)
        self.world.reserve(client, namespace, [], len(path))
        if fresh := [slot for slot in client.reserved if slot not in before]:
            self.world.commit(client, fresh, path, lease)
            if not keep:
                self.world.release(client, lease, 0, self.cache.release(Release(client.session, lease)))

    @rule(seed=seeds, namespace=namespaces, word=st.integers(2, 40), blocks=st.integers(1, 8))
    def flood(self, seed: int, namespace: int, word: int, blocks: int) -> None:
        """Other prompts come by, and go."""
        for i in range(blocks):
            self.put(seed, namespace, (word + i,), 7, keep=False)

    @rule()
    def write_all(self) -> None:
        self.finish_all()
        self.pull_writes(100)
        self.finish_all()

    @rule(seed=seeds)
    def abandon(self, seed: int) -> None:
        client = self._client(seed)
        if client is None or not client.reserved:
            return
        slot = list(client.reserved)[seed % len(client.reserved)]
        units, generations = (pack_one(value) for value in slot)
        self.cache.abandon(Abandon(client.session, 0, units, generations))
        del client.reserved[slot], client.reserved_in[slot]

    # ---- reading

    @rule(seed=seeds, namespace=namespaces, path=paths, lease=st.integers(1, 6), group=st.booleans(), wait=st.floats(0.1, 5))
    def acquire(self, seed: int, namespace: int, path: Path, lease: int, group: bool, wait: float) -> None:
        if client := self._client(seed):
            name = "model" if group and self.cache.state.groups else ""
            members = (1, 3) if name else (namespace,)
            request = Acquire(client.session, lease, pack(chain(path)), self.world.now + wait, 0 if name else namespace, name)
            self.world.acquired(client, lease, members, chain(path), self.cache.acquire(request, self.world.now))

    @rule(seed=seeds, path=paths, lease=st.integers(1, 6), word=st.integers(0, 9), more=st.integers(0, BLOCK_TOKENS))
    def acquire_on(self, seed: int, path: Path, lease: int, word: int, more: int) -> None:
        """With a prompt that goes on after its whole blocks, or is just a path of which a part is stored."""
        client = self._client(seed)
        if client and lease not in client.leases and lease not in client.asked:
            acquire_on(self.world, client, lease, path, tokens_of((word,))[:more])

    @rule(seed=seeds, other=seeds)
    def claim(self, seed: int, other: int) -> None:
        client, source = self._client(seed), self._client(other)
        if client and source:
            for lease, (members, _) in list(source.asked.items()):
                if members == (1, 3) and lease not in client.leases:
                    answer = self.cache.claim(Claim(client.session, lease, "model", 3))
                    self.world.claimed(client, lease, source, 1, answer)

    @rule(seed=seeds, keep=st.sampled_from([0, 0, 1, 2]))
    def release(self, seed: int, keep: int) -> None:
        client = self._client(seed)
        if client and client.leases:
            lease = list(client.leases)[seed % len(client.leases)]
            if (lease not in client.asked and len(client.leases[lease]) == 1) or lease in client.asked:
                answer = self.cache.release(Release(client.session, lease, keep))
                self.world.release(client, lease, keep, answer)

    @rule(namespace=namespaces, path=paths)
    def lookup_changes_nothing(self, namespace: int, path: Path) -> None:
        before = self.cache.stats(), self.cache.state.policies
        looked = self.cache.lookup("default", namespace, "", pack(chain(path)))
        assert looked.blocks <= len(path)  # type: ignore[union-attr]
        assert before == (self.cache.stats(), self.cache.state.policies)
        for key in chain(path)[: looked.blocks if namespace != 3 else 0]:  # type: ignore[union-attr]
            assert (namespace, key) in self.world.truth

    # ---- the mover, the clock, the operator

    @rule(limit=st.integers(1, 4))
    def pull_writes(self, limit: int) -> None:
        for write in self.cache.next_writes(limit):
            self.world.pending[write.transfer] = write

    @rule(limit=st.integers(1, 4))
    def pull_sums(self, limit: int) -> None:
        for verify in self.cache.next_sums(limit * UNIT):
            self.world.pending[verify.transfer] = verify

    @rule(limit=st.integers(1, 4))
    def pull_scrubs(self, limit: int) -> None:
        for scrub in self.cache.next_scrubs(limit * UNIT):
            self.world.pending[scrub.transfer] = scrub

    @rule(seed=seeds, tier=st.sampled_from([Tier.DRAM, Tier.NVME]))
    def rot(self, seed: int, tier: Tier) -> None:
        self.world.rot(seed, tier)

    @rule(seed=seeds, result=st.sampled_from([TransferResult.OK] * 8 + list(TransferResult)))
    @precondition(lambda self: self.world.pending)
    def finish_transfer(self, seed: int, result: TransferResult) -> None:
        pending = list(self.world.pending)
        self.world.finish(pending[seed % len(pending)], result)

    @rule()
    def finish_all(self) -> None:
        self.world.step()
        for transfer in list(self.world.pending):
            self.world.finish(transfer, TransferResult.OK)

    @rule(seconds=st.floats(0.05, 3))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        for client in self.world.clients.values():
            self.cache.heard(client.session, self.world.now)
        self.cache.tick(self.world.now)
        late = [lease.id for lease in self.cache.state.waiting if lease.pending and lease.deadline_at <= self.world.now]
        assert not late, "no lease waits past its deadline"

    @rule(namespace=namespaces, path=paths)
    def prefetch(self, namespace: int, path: Path) -> None:
        self.cache.prefetch(namespace, pack(chain(path)), self.world.now + 1)

    @rule(namespace=namespaces, path=paths, on=st.booleans())
    def pin(self, namespace: int, path: Path, on: bool) -> None:
        (self.cache.pin if on else self.cache.unpin)(namespace, pack(chain(path)))

    @rule(seed=seeds, namespace=namespaces)
    def clear(self, seed: int, namespace: int) -> None:
        if seed % 5 == 0:
            start = 1 if seed % 2 else 0  # half of them first in pieces, between which the cache goes on
            while start:
                _, start = clear_piece(self.cache.state, (namespace,), start, most=3)
                self.world.step()
                assert violations(self.cache.state) == []
            self.cache.clear(seed + 1, (namespace,))
            looked = self.cache.lookup("default", namespace, "", pack(chain((0,))))
            assert looked.blocks == 0  # type: ignore[union-attr]

    def teardown(self) -> None:
        """When everyone has left and all transfers have ended, nothing is held."""
        if not hasattr(self, "world"):
            return
        for client in list(self.world.clients.values()):
            self.cache.session_lost(client.session, "end")
            self.cache.process_gone(client.session)
        self.world.clients.clear()
        for _ in range(6):
            self.world.now += 5
            self.cache.tick(self.world.now)
            self.world.step()
            for transfer in list(self.world.pending):
                self.world.finish(transfer, TransferResult.OK)
        for figures in self.cache.stats().tiers.values():
            assert figures.held_bytes == 0
            assert sum(figures.class_bytes.values()) == figures.capacity_bytes
            assert figures.class_bytes["reserved"] == figures.class_bytes["orphaned"] == figures.class_bytes["doomed"] == 0
        assert self.cache.state.dram.capacity_bytes % UNIT == 0


def pack_one(value: int) -> Units:
    return np.array([value], np.uint32)


TestCacheMachine = pytest.mark.timeout(900)(CacheMachine.TestCase)  # a minute on an idle machine
TestCacheMachine.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=35, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


class PlainCacheMachine(CacheMachine):
    """As on a machine without a C compiler."""

    compiled = False


TestPlainCacheMachine = PlainCacheMachine.TestCase
TestPlainCacheMachine.settings = settings(TestCacheMachine.settings, max_examples=EXAMPLES // 20)
