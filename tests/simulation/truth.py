"""What is true: which bytes were committed under which key, what was reported stored, and what clients were promised.

It looks at the cache from outside (`observe`), and knows no rule but these: what is served are the bytes committed last under that key;
what was reported stored is found after a crash; what was granted stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from kvstore.cache.core import Cache
from kvstore.cache.invariants import violations
from kvstore.cache.messages import (
    Acquire,
    Acquired,
    BlockOutcome,
    Claimed,
    ClearFinished,
    Commit,
    Committed,
    Corrupted,
    Decision,
    Done,
    Granted,
    Hashes,
    Notice,
    NoticeKind,
    Reserved,
    Tier,
    unpack_hashes,
)
from kvstore.cache.slots import SlotState
from tests.simulation.machine import Machine
from tests.simulation.memory import UNIT_BYTES, ArenaFile, Memory
from tests.simulation.tails import donor_of
from tests.simulation.words import short

INPUTS = (
    "acquire", "claim", "reserve", "commit", "abandon", "release", "attach", "detach", "session_lost", "process_gone", "join_group",
    "prefetch", "pin", "unpin", "clear", "clear_piece", "transfer_done", "next_writes", "survivors_gone", "open_namespace",
)  # fmt: skip

Key = tuple[bytes, bytes]  # namespace digest, block hash


@dataclass(eq=False)
class Held:
    """Bytes of the arena that a process relies on: it may look at them at any time."""

    owner: str
    arena: ArenaFile
    start: int
    expected: bytes
    key: bytes


@dataclass
class Truth:
    """See the module's text."""

    machine: Machine
    memory: Memory
    power: bool  # durable = power
    made: dict[bytes, Key] = field(default_factory=dict)  # whose block these bytes are
    latest: dict[Key, bytes] = field(default_factory=dict)  # committed last, as far as this run of the daemon must know
    ever: dict[Key, set[bytes]] = field(default_factory=dict)
    forgotten: dict[Key, set[bytes]] = field(default_factory=dict)  # cleared, and reported so
    stored: dict[Key, bytes | None] = field(default_factory=dict)  # reported stored on nvme
    unwritten: set[Key] = field(default_factory=set)  # in memory, and not yet reported stored on nvme
    clearing: dict[int, dict[Key, set[bytes]]] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    served: int = 0
    reached: Counter[str] = field(default_factory=Counter)  # what a run is for, and how often it came to that
    lies: Callable[[], bool] = lambda: False

    # ---- bytes

    def make(self, key: Key, size_bytes: int) -> bytes:
        """The bytes of a new block: never the same twice."""
        stamp = sha256(b"%d " % len(self.made) + key[0] + key[1]).digest()
        content = (stamp * (size_bytes // len(stamp) + 1))[:size_bytes]
        self.made[content] = key
        return content

    def committed(self, key: Key, content: bytes) -> None:
        """A block became visible in dram with these bytes."""
        self.known(key, content)
        self.latest[key] = content
        self.unwritten.add(key)

    def known(self, key: Key, content: bytes) -> None:
        """These bytes became visible under this key, somewhere; were they cleared before, they are there again."""
        if self.made.get(content) != key:
            self.machine.wrong("a block was committed with bytes that nobody wrote for it", key[1])
        self.ever.setdefault(key, set()).add(content)
        for gone in (self.forgotten, *self.clearing.values()):
            gone.get(key, set()).discard(content)

    def grant(self, key: Key, content: bytes, where: str) -> None:
        """The daemon gives these bytes out as this block now: they must be those committed last."""
        self.check(key, content, where)
        if self.lies():
            return
        wanted = self.latest.setdefault(key, content)
        if content != wanted:
            self.machine.wrong(f"{where}: not the bytes committed last under this key", key[1])
        if content in self.forgotten.get(key, ()):
            self.machine.wrong(f"{where}: bytes that were cleared", key[1])

    def check(self, key: Key, content: bytes, where: str) -> None:
        """Somebody sees these bytes as this block, given to it some time ago: they must have been committed under its key."""
        self.served += 1
        known = self.made.get(content)
        if known is not None and known != key:
            self.machine.wrong(f"{where}: the bytes of another block, {known[1].hex()[:12]}", key[1])
        if content not in self.ever.get(key, ()):
            self.machine.wrong(f"{where}: bytes that were never committed", key[1])

    # ---- what clients hold

    def hold(self, owner: str, arena: ArenaFile, start: int, expected: bytes, key: bytes) -> Held:
        """These bytes must stay until `let_go`, whatever happens to the owner's session."""
        held = Held(owner, arena, start, expected, key)
        if bytes(arena.units[start : start + len(expected)]) != expected:
            self.machine.wrong(f"{owner} holds unit {start // UNIT_BYTES} with other bytes than it should", key)
        if start // UNIT_BYTES not in self.memory.marked_for(self.machine.running) and self.memory.arena is arena:
            self.machine.wrong(f"{owner} was given unit {start // UNIT_BYTES}, which is not marked as its own", key)
        self.held.append(held)
        return held

    def let_go(self, *held: Held) -> None:
        """The owner has no more use for them."""
        for each in held:
            self.held.remove(each)

    def died(self, owner: str) -> None:
        """A process has no more use for anything."""
        self.held = [held for held in self.held if held.owner != owner]

    def promises_hold(self) -> None:
        """All that is held is as it was."""
        for held in self.held:
            if held.arena.units[held.start : held.start + len(held.expected)].tobytes() != held.expected:
                self.machine.wrong(f"the bytes that {held.owner} holds at unit {held.start // UNIT_BYTES} changed", held.key)

    # ---- crashes

    def daemon_died(self) -> None:
        """What it had reported stored must be there when it is back; of the rest, any of what was committed may be."""
        self.latest = {key: content for key, content in self.stored.items() if content is not None}
        self.unwritten.clear()
        self.clearing.clear()

    def power_failed(self) -> None:
        """As `daemon_died`; what was not synced is void, deletions too."""
        self.held.clear()
        if not self.power:
            self.stored.clear()
            self.latest.clear()
            self.forgotten.clear()


class Watched:
    """One daemon's cache, every input and decision of which is looked at."""

    def __init__(self, cache: Cache, truth: Truth, machine: Machine) -> None:
        self.cache = cache
        self.changed = True
        self.corrupt = 0
        self.before_commit: Callable[[int, Key, bytes], None] = lambda *_: None  # by which session
        self._truth, self._machine, self._process = truth, machine, machine.running
        self._asked: dict[tuple[int, int], Hashes] = {}  # by session and lease
        self._tenures: set[tuple[int, int]] = set()  # units and generation of every slot given out
        for name in INPUTS:
            setattr(cache, name, self._noted(name, getattr(cache, name)))
        for name, watch in {"acquire": self._acquire, "commit": self._commit, "clear": self._clear, "drain": self._drain}.items():
            setattr(cache, name, watch(getattr(cache, name)))

    def check(self) -> None:
        """The rules hold, if anything has changed since the last look."""
        self._truth.promises_hold()
        if self.changed:
            self.changed = False
            if broken := violations(self.cache.state):
                self._machine.wrong("; ".join(broken))

    def all_found(self, at_rest: bool) -> None:
        """After recovery: what was reported stored is there, what was reported cleared is not. What is there besides is reported by now.

        at_rest  the last daemon had nothing left to do: what it had removed is not there either
        """
        for digest, key in self._truth.stored:
            namespace = self.cache.state.namespace_ids.get(b"default\0" + digest, 0)
            row = self.cache.state.index.find_one(namespace, key) if namespace else 0
            if not row or not self.cache.state.index.slot_at[Tier.NVME][row]:
                self._machine.wrong("a block that was reported stored is not found after a crash", key)
        index = self.cache.state.index
        for row in np.flatnonzero(index.slot.get(Tier.NVME, ())).tolist():
            found = (self._digest(index.namespace_at[row]), index.hash_bytes(row))
            if self._truth.ever.get(found, set()) <= self._truth.forgotten.get(found, set()):
                self._machine.wrong("a block that was cleared is found after a crash", found[1])
            if at_rest and found not in self._truth.stored:
                self._machine.wrong("a block that was removed, and its record deleted, is found after a crash", found[1])
            self._truth.stored.setdefault(found, self._truth.latest.get(found))

    def _new_tenures(self, reserved: Reserved) -> None:
        """A slot is given out under a name that it never had before: an operation that comes late means nobody else's slot."""
        for units, generation in zip(reserved.units.tolist(), reserved.generations.tolist(), strict=True):
            if generation and (units, generation) in self._tenures:
                self._machine.wrong(f"unit {units} is given out a second time with generation {generation}")
            self._tenures.add((units, generation))

    # ---- wrappers

    def _digest(self, namespace: int) -> bytes:
        return self.cache.state.spec(namespace).digest

    def _noted(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            answer = act(*args)
            self.changed = True
            if isinstance(answer, Claimed):
                self._truth.reached["claimed"] += 1
            if isinstance(answer, Reserved):
                self._new_tenures(answer)
            if name == "attach" and isinstance(answer, Done) and args[0].resume:
                self._truth.reached["resumed"] += 1
            if self._machine.story is not None:
                self._machine.note(f"{name} {short(args[0]) if args else ''} -> {short(answer)}")
            return answer

        return wrapped

    def _acquire(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(request: Acquire, now: float) -> Any:
            answer = act(request, now)
            if isinstance(answer, Acquired):
                self._asked[request.session, request.lease] = request.hashes
                if answer.tail_tokens:
                    whole = unpack_hashes(request.hashes[: answer.expected - 1].tobytes() + donor_of(self.cache, request, answer))
                    self._asked[request.session, request.lease] = whole
            return answer

        return wrapped

    def _commit(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(request: Commit) -> Any:
            answer = act(request)
            if isinstance(answer, Committed) and self._process.alive:
                spec = self.cache.state.spec(request.namespace)
                for i in np.flatnonzero(answer.outcomes == BlockOutcome.STORED).tolist():
                    start = int(request.units[i]) * UNIT_BYTES
                    self._committed(request.session, (spec.digest, request.hashes[i].tobytes()), self._bytes(start, spec.block_bytes))
            return answer

        return wrapped

    def _committed(self, session: int, key: Key, content: bytes) -> None:
        self.before_commit(session, key, content)
        self._truth.committed(key, content)

    def _grant(self, key: Key, content: bytes, where: str) -> None:
        self._truth.grant(key, content, where)

    def _clear(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(clear_id: int, namespaces: tuple[int, ...]) -> Any:
            digests = {self._digest(namespace) for namespace in namespaces}
            truth = self._truth
            gone = {key: set(contents) for key, contents in truth.ever.items() if key[0] in digests}
            for key in gone:
                truth.latest.pop(key, None)
            truth.clearing[clear_id] = gone
            return act(clear_id, namespaces)

        return wrapped

    def _drain(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped() -> list[Decision]:
            decisions: list[Decision] = act()
            for decision in decisions if self._process.alive else ():
                self.changed = True
                if self._machine.story is not None:
                    self._machine.note(f"decides {short(decision)}")
                self._decided(decision)
            return decisions

        return wrapped

    def _decided(self, decision: Decision) -> None:
        truth = self._truth
        match decision:
            case Granted():
                self._granted(decision)
            case Notice(kind=NoticeKind.STORED, tier=Tier.NVME):
                for key in self._keys(decision):
                    truth.stored[key] = truth.latest.get(key)
                    truth.unwritten.discard(key)
            case Notice(kind=NoticeKind.REMOVED, tier=Tier.DRAM):
                truth.unwritten.difference_update(self._keys(decision))
            case Notice(kind=NoticeKind.REMOVED, tier=Tier.NVME):
                for key in self._keys(decision):
                    truth.stored.pop(key, None)
            case ClearFinished(clear):
                for key, contents in truth.clearing.pop(clear).items():
                    truth.forgotten.setdefault(key, set()).update(contents)
            case Corrupted():
                self.corrupt += 1
            case _:
                pass

    def _keys(self, notice: Notice) -> list[Key]:
        digest = self._digest(notice.namespace)
        return [(digest, hash_.tobytes()) for hash_ in unpack_hashes(notice.hashes)]

    def _granted(self, granted: Granted) -> None:
        """Every slot of a grant has the bytes of the block that was asked for."""
        state, hashes = self.cache.state, self._asked.get((granted.session, granted.lease))
        session = state.sessions.get(granted.session)
        lease = session.leases.get(granted.lease) if session else None
        if lease is None or hashes is None:
            return
        for member, namespace in enumerate(lease.namespaces):
            spec = state.spec(namespace)
            for i in np.flatnonzero(granted.generations[member]).tolist():
                units = int(granted.units[member, i])
                key = (spec.digest, hashes[granted.first + i].tobytes())
                content = self._bytes(units * UNIT_BYTES, spec.block_bytes)
                doomed = state.dram.state_at[state.dram.locate(units)] == SlotState.DOOMED
                (self._truth.check if doomed else self._grant)(key, content, f"unit {units}, granted to session {granted.session}")

    def _bytes(self, start: int, size_bytes: int) -> bytes:
        arena = self._truth.memory.arena
        return bytes(arena.units[start : start + size_bytes]) if arena else b""
