"""Clients that speak the session's own operations, as an engine does: anonymous slots, chains held under leases, groups, claims,
sessions that are resumed; and now and then an operation on what is not theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.answers import Answer, Slotted
from kvstore.clients.blocks import Prompt
from kvstore.clients.channel import CALL_TIMEOUT_S, error_of
from kvstore.clients.handles import EXISTS, STORED, Attached
from kvstore.clients.link import Unmapped
from kvstore.clients.pools import PoolTerms
from kvstore.clients.session import Granting
from kvstore.hashing import token_bytes
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub
from tests.simulation.hands import Hands, Link, Private, Slot
from tests.simulation.keys import KINDS, ROOT, SMALL, WINDOW, Kind, chain, some_path, tokens_of
from tests.simulation.lives import EXPECTED, Street, fill
from tests.simulation.machine import Process
from tests.simulation.memory import UNIT_BYTES, Map
from tests.simulation.tails import Going
from tests.simulation.truth import Held

GROUP = (SMALL, WINDOW)


class Engine:
    """One process, whose slots are in the arena."""

    pool = 0  # where its operations are: the arena

    def __init__(self, street: Street, process: Process) -> None:
        self._street, self._process, self._chance = street, process, process.chance
        self._truth = street.truth
        self._ids = count(1 + process.chance.randrange(1000) * 1000)  # of leases and reservations: a resumed session keeps its own
        self._stub: Any = KVStoreStub(cast(Any, grpc.aio.insecure_channel("simulated")))
        self._link: Link
        self._attached: Attached
        self._namespaces: dict[str, pb.OpenNamespaceReply] = {}
        self._hands = Hands()
        self._joined = False

    async def run(self) -> None:
        """Sessions, one after another, until the street closes."""
        before: Link | None = None
        while not self._street.closing:
            try:
                await self._attach(before)
            except (*EXPECTED, errors.NotFound) as error:  # not found: the session that it would resume
                self._note(error)
                before = None
                await self._rest()
                continue
            while self._alive() and not self._street.closing:
                await self._act()
            if self._alive():
                break
            before = self._link
            await asyncio.sleep(self._chance.choice((0.0, 0.01, 0.5)))  # an engine looks at what it holds for a while
            if self._chance.random() < 0.5:
                before = None
                await self._rest()
        await self._rest()

    def _alive(self) -> bool:
        return self._link.alive

    async def _rest(self) -> None:
        """Drop everything, and the session with it."""
        self._truth.let_go(*self._hands.held())
        self._hands = Hands()
        if hasattr(self, "_attached"):
            self._attached.drop()
            await self._link.close()
            del self._attached

    # ---- sessions

    async def _attach(self, before: Link | None) -> None:
        limit = self._chance.choice((0, 0, 0, 12)) * UNIT_BYTES
        hello = requests.hello(self._process.name, 0, limit, self._pools())
        if before is not None and before.welcome is not None:
            hello.resume_session, hello.resume_token = before.welcome.session, before.welcome.resume_token
        old = getattr(self, "_attached", None)
        link = Link(self._stub, "simulated", hello, old.arena if old else None)
        opened = await link.open()
        if isinstance(opened, Unmapped):
            raise errors.Unavailable("not mapped")
        opened.hold()
        try:
            for kind in KINDS:
                request = kind.request(self._street.tails)
                self._namespaces[kind.name] = await self._called(self._stub.OpenNamespace(request, timeout=CALL_TIMEOUT_S))
                if self._namespaces[kind.name].epoch != opened.session.epoch:
                    raise errors.StaleEpoch("another daemon by now")
            self._map(opened)
        except errors.KVStoreError:
            self._truth.let_go(*self._hands.held())  # what was resumed ends with this session
            self._hands = Hands()
            opened.drop()
            await link.close()
            raise
        if old is not None:
            old.drop()  # the new session's lock is held by now
        self._link, self._attached, self._joined = link, opened, False

    def _pools(self) -> list[PoolTerms]:
        """What it asks for of GPUs."""
        return []

    def _map(self, opened: Attached) -> None:
        """Take the memory of a new session."""
        self._file = cast(Map, opened.arena).file

    async def _fill(self, slot: Slot, content: bytes) -> Held:
        """Write a slot."""
        start = slot[0] * UNIT_BYTES
        view = self._file.units[start : start + len(content)]
        return cast(Held, await fill(self._truth, self._process, view, content, (self._file, start)))

    async def _called(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except grpc.RpcError as error:
            raise error_of(error, "simulated") from None

    # ---- what it does

    def _acts(self) -> list[tuple[int, Callable[[], Awaitable[None]]]]:
        return [
            (6, self._reserve), (10, self._commit), (6, self._acquire), (8, self._release), (3, self._abandon),
            (2, self._acquire_for_group), (3, self._claim), (2, self._misuse), (3, self._reserve_named),
            (6 if self._street.tails else 0, self._acquire_with_tail),
        ]  # fmt: skip

    async def _act(self) -> None:
        acts = self._acts()
        act = self._chance.choices([act for _, act in acts], [weight for weight, _ in acts])[0]
        try:
            await act()
        except EXPECTED as error:
            self._note(error)
        await asyncio.sleep(self._chance.expovariate(40))

    async def _ask(self, *ops: pb.Op) -> list[Answer]:
        return await self._link.ask(list(ops), CALL_TIMEOUT_S)

    def _id(self, kind: Kind) -> int:
        return self._namespaces[kind.name].namespace_id

    def _hold(self, slot: Slot, expected: bytes, key: bytes) -> Held:
        return self._truth.hold(self._process.name, self._file, slot[0] * UNIT_BYTES, expected, key)

    async def _reserve(self) -> None:
        kind = self._chance.choice(KINDS)
        answer = (await self._ask(requests.reserve(next(self._ids), self._id(kind), count=self._chance.randrange(1, 5), pool=self.pool)))[0]
        if isinstance(answer, Slotted):
            slots = zip(answer.units.tolist(), answer.generations.tolist(), strict=True)
            self._hands.private += [Private(slot, kind) for slot in slots]

    async def _reserve_named(self) -> None:
        """As another engine of the same kind would, and give them back unless they are filled at once."""
        kind, reservation = self._chance.choice(KINDS), next(self._ids)
        hashes = chain(some_path(self._chance))
        answer = (await self._ask(requests.reserve(reservation, self._id(kind), hashes=b"".join(hashes), pool=self.pool)))[0]
        await asyncio.sleep(self._chance.choice((0.0, 0.05)))
        if isinstance(answer, Slotted):
            self._link.tell([requests.abandon(reservation, pool=self.pool)])

    async def _commit(self) -> None:
        """Fill private slots with the leading blocks of a prompt, and publish them under a lease."""
        kind = self._chance.choice(KINDS)
        empty = [each for each in self._hands.private if each.kind is kind and each.held is None]
        path = some_path(self._chance)
        hashes = chain(path)[: len(empty)]
        chosen = empty[: len(hashes)]
        if not chosen:
            return
        for each, hash_ in zip(chosen, hashes, strict=True):
            each.held = await self._fill(each.slot, self._truth.make((self._namespaces[kind.name].digest, hash_), kind.block_bytes))
        units, generations = (np.array(column, np.uint32) for column in zip(*(each.slot for each in chosen), strict=True))
        lease = self._chance.choice([*self._hands.leases, next(self._ids)]) if self._chance.random() < 0.3 else next(self._ids)
        ids = token_bytes(tokens_of(path[: len(chosen)])) if self._namespaces[kind.name].tails and self._chance.random() < 0.8 else b""
        op = requests.commit(lease, self._id(kind), (units, generations), b"".join(hashes), ROOT, ids, pool=self.pool)
        answer = (await self._ask(op))[0]
        if not isinstance(answer, Slotted):
            return
        for i, each in enumerate(chosen):
            if answer.outcomes[i] == STORED:
                self._hands.private.remove(each)
                self._hands.leases.setdefault(lease, []).append(cast(Held, each.held))
            elif answer.outcomes[i] == EXISTS and answer.generations[i]:
                self._hands.leases.setdefault(lease, []).append(self._look((answer.units[i], answer.generations[i]), kind, hashes[i]))

    def _look(self, slot: Slot, kind: Kind, hash_: bytes) -> Held:
        """A slot that we may read: what is in it is the block, and stays."""
        start = int(slot[0]) * UNIT_BYTES
        content = self._file.units[start : start + kind.block_bytes].tobytes()
        self._truth.check((self._namespaces[kind.name].digest, hash_), content, f"{self._process} reads unit {slot[0]}")
        return self._hold((int(slot[0]), int(slot[1])), content, hash_)

    async def _acquire(self) -> None:
        kind, lease = self._chance.choice(KINDS), next(self._ids)
        hashes = chain(some_path(self._chance))
        timeout_s = self._chance.choice((0.001, 0.05, 0.5))
        op = requests.acquire(lease, self._id(kind), b"".join(hashes), timeout_s, pool=self.pool)
        granting = await self._link.take(op, timeout_s + 1.0)
        await self._take(lease, granting, (kind,), hashes)

    async def _acquire_with_tail(self) -> None:
        kind, lease, prompt = SMALL, next(self._ids), Going.some(self._chance)
        timeout_s = self._chance.choice((0.001, 0.05, 0.5))
        op = requests.acquire(lease, self._id(kind), prompt.hashes, timeout_s, Prompt(prompt.tokens, ROOT), pool=self.pool)
        granting = await self._link.take(op, timeout_s + 1.0)
        tail = granting.tail
        whole = granting.blocks - (tail is not None)
        await self._take(lease, granting, (kind,), chain(prompt.path)[:whole])
        if tail is None or lease not in self._hands.leases:
            return
        start = tail.unit * UNIT_BYTES
        made = self._truth.made.get(self._file.units[start : start + kind.block_bytes].tobytes())
        if made is None or not prompt.is_donor(made[1], whole, tail.tokens):
            self._street.machine.wrong(f"unit {tail.unit} was named a donor of {tail.tokens} tokens and is none")
        self._hands.leases[lease].append(self._look((tail.unit, tail.generation), kind, made[1]))

    async def _take(self, lease: int, granting: Granting, kinds: tuple[Kind, ...], hashes: tuple[bytes, ...]) -> None:
        if granting.error is not None:
            raise granting.error
        if not self._link.alive:
            return
        held = []
        for member, kind in enumerate(kinds):
            slots = zip(granting.units[member].tolist(), granting.generations[member].tolist(), strict=True)
            held += [self._look(slot, kind, hash_) for slot, hash_ in zip(slots, hashes, strict=False) if slot[1]]
        self._hands.leases[lease] = held
        if not granting.settled:
            self._truth.let_go(*held)
            del self._hands.leases[lease]
            self._link.tell([requests.release(lease, pool=self.pool)])

    async def _acquire_for_group(self) -> None:
        if not await self._join():
            return
        lease, path = next(self._ids), some_path(self._chance)
        op = pb.Op(acquire=pb.Acquire(lease=lease, group="model", hashes=b"".join(chain(path)), timeout_s=0.5), pool=self.pool)
        granting = await self._link.take(op, 1.5)
        if granting.blocks:
            await self._take(lease, granting, GROUP, chain(path))
            self._street.group_leases.setdefault(self.pool, []).append((lease, path))

    async def _join(self) -> bool:
        if not self._joined and self._link.alive:
            request = pb.JoinGroupRequest(session=self._attached.session.id, group="model", epoch=self._attached.session.epoch)
            request.namespace_ids.extend(self._id(kind) for kind in GROUP)
            await self._called(self._stub.JoinGroup(request, timeout=CALL_TIMEOUT_S))
            self._joined = True
        return self._link.alive

    async def _claim(self) -> None:
        """One member's slots under a lease that another engine acquired for the group."""
        leases = self._street.group_leases.get(self.pool)
        if not leases or not await self._join():
            return
        lease, path = self._chance.choice(leases[-4:])
        if lease in self._hands.leases:
            return
        kind = self._chance.choice(GROUP)
        answer = (await self._ask(pb.Op(claim=pb.Claim(lease=lease, group="model", namespace_id=self._id(kind)), pool=self.pool)))[0]
        if isinstance(answer, Slotted) and self._link.alive:
            slots = zip(answer.units.tolist(), answer.generations.tolist(), strict=True)
            self._hands.leases[lease] = [self._look(slot, kind, hash_) for slot, hash_ in zip(slots, chain(path), strict=False) if slot[1]]

    async def _release(self) -> None:
        if not self._hands.leases:
            return
        lease = self._chance.choice(list(self._hands.leases))
        self._truth.let_go(*self._hands.leases.pop(lease))
        self._link.tell([requests.release(lease, pool=self.pool)])

    async def _abandon(self) -> None:
        if not self._hands.private:
            return
        some = self._chance.sample(self._hands.private, self._chance.randrange(1, len(self._hands.private) + 1))
        for each in some:
            self._hands.private.remove(each)
            self._truth.let_go(*([each.held] if each.held else []))
        units, generations = (np.array(column, np.uint32) for column in zip(*(each.slot for each in some), strict=True))
        self._link.tell([requests.abandon(next(self._ids), (units, generations), pool=self.pool)])

    async def _misuse(self) -> None:
        """Operations on slots, leases and keys that are not this session's, or no more."""
        kind, number = self._chance.choice(KINDS), self._chance.randrange(12)
        units, generations = np.array([number], np.uint32), np.array([self._chance.randrange(1, 6)], np.uint32)
        hashes = chain(some_path(self._chance))
        ops = [
            requests.release(self._chance.randrange(10**8, 10**9)),
            requests.release(next(self._ids), keep_blocks=3),
            requests.acquire(next(self._ids), 99, hashes[0], 0.1),
            requests.reserve(next(self._ids), self._id(kind), hashes=hashes[0] * 3),
            requests.abandon(next(self._ids)),
        ]
        ours = {each.slot for each in self._hands.private}
        if (number, int(generations[0])) not in ours:
            ops += [
                requests.commit(next(self._ids), self._id(kind), (units, generations), hashes[0], ROOT),
                requests.abandon(next(self._ids), (units, generations)),
            ]
        op = self._chance.choice(ops)
        op.pool = self.pool
        answer = (await self._ask(op))[0]
        if op.HasField("reserve") and isinstance(answer, Slotted):
            self._link.tell([requests.abandon(op.reserve.reservation, pool=self.pool)])
        if op.HasField("commit") and isinstance(answer, Slotted) and STORED in answer.outcomes:
            self._street.machine.wrong("a block was stored from a slot that was not this session's", hashes[0])

    def _note(self, error: Exception) -> None:
        self._street.machine.note(f"is told {type(error).__name__}: {error}")
