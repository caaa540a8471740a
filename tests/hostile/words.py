"""Messages that nobody should send: any type of message, its fields filled with what is nearly right, far out, or nothing like it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvstore.clients import requests
from kvstore.proto import kvstore_pb2 as pb
from tests.blocks import GEOMETRY, IDENTITY, chain

INTEGERS = (0, 1, 2, 3, 7, 63, 64, 255, 256, 4095, 4096, 8191, 8192, 8193, 65_535, 2**31 - 1, 2**31, 2**32 - 1)
LARGE = (2**32, 2**53 + 1, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
TIMES_S = (0.0, 0.001, 0.05, 1.0, 3600.0, 3600.1, -1.0, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
TEXTS = ("", "a", "default", "all", "window", "state", "mha", "mla", "kv1", "bfloat16", "float8_e4m3fn", "per_channel", "int4", "g1", "g2")
ODD_TEXTS = ("tp0/2", "tp9/2", "tp0/2,pp1/4", "tp-1/0", "\0", "../../etc", "%s%n{}", "🗝" * 1500, "x" * 5000, "line\nof\rits\x1bown")
LENGTHS = (0, 1, 3, 4, 5, 16, 31, 32, 33, 64, 65, 128, 512, 4096)
LONG = (32 * 8192, 32 * 8193, 100_000)
BITS = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}
KEEPS = (requests.KEEP_ALL, requests.Keep("window", 64), requests.Keep("state"))
# The attackers' namespaces, a shard of their own.
OPENS = tuple(requests.open_namespace(IDENTITY, GEOMETRY, "tp0/2", keep.kind, keep, tails=keep.kind == "all") for keep in KEEPS)

Made = TypeVar("Made", bound=Message)


@dataclass
class Words:
    """What an attacker has learnt: values that are right, to be used where they belong and where they do not."""

    chance: random.Random
    epoch: str = ""
    namespaces: list[int] = field(default_factory=lambda: [1])
    sessions: list[int] = field(default_factory=lambda: [1])
    tokens: list[bytes] = field(default_factory=lambda: [b""])
    slots: list[tuple[int, int]] = field(default_factory=lambda: [(0, 1)])  # units, generation
    keys: list[bytes] = field(default_factory=lambda: [chain(seed, 1) for seed in range(900, 940)])

    def learn_slots(self, units: bytes, generations: bytes) -> None:
        """Slots that the daemon gave."""
        pairs = zip(memoryview(units).cast("I"), memoryview(generations).cast("I"), strict=False)
        self.slots = [*self.slots, *pairs][-64:]

    # ---- values

    def number(self, bits: int) -> int:
        """Any that the type holds, most of them small or at an edge."""
        pick = self.chance.random()
        if pick < 0.7:
            return self.chance.choice(INTEGERS)
        if pick < 0.85 and bits == 64:
            return self.chance.choice(LARGE)
        return self.chance.getrandbits(bits)

    def hashes(self) -> bytes:
        """Packed ones: known, new, twice the same, a whole chain, or of a wrong length."""
        pick = self.chance.random()
        if pick < 0.5:
            return b"".join(self.chance.choices(self.keys, k=self.chance.randint(1, 12)))
        if pick < 0.6:
            return self.chance.choice(self.keys) * self.chance.randint(2, 9)
        if pick < 0.75:
            return b"".join(self.keys[: self.chance.randint(1, 40)])
        return self.junk()

    def junk(self) -> bytes:
        """Bytes without sense."""
        length = self.chance.choice(LONG) if self.chance.random() < 0.01 else self.chance.choice(LENGTHS)
        return self.chance.randbytes(length)

    def packed_words(self, which: int) -> bytes:
        """Units (0) or generations (1) of slots it was given, or nearly."""
        if self.chance.random() < 0.2:
            return self.junk()
        slots = self.chance.choices(self.slots, k=self.chance.randint(1, 6))
        return b"".join(((slot[which] + (self.chance.random() < 0.1)) % 2**32).to_bytes(4, "little") for slot in slots)

    def text(self) -> str:
        """A word."""
        return self.chance.choice(TEXTS + ODD_TEXTS)

    def seconds(self) -> float:
        """A time to wait, or what looks like one."""
        return self.chance.choice(TIMES_S)

    # ---- messages

    def any_of(self, kind: type[Made]) -> Made:
        """One of this type, filled at random."""
        made = self.message(kind.DESCRIPTOR)  # type: ignore[arg-type]
        assert isinstance(made, kind)
        return made

    def message(self, kind: Descriptor) -> Message:
        """One of this type. Which of its fields are set is random, most are."""
        made: Message = GetMessageClass(kind)()
        for each in kind.fields:
            if self.chance.random() < 0.75:
                self._fill(made, each)
        return made

    def _fill(self, made: Message, into: FieldDescriptor) -> None:
        if into.message_type is not None and into.message_type.GetOptions().map_entry:
            facts = dict(OPENS[0].facts) if self.chance.random() < 0.7 else {self.text(): self.text()}
            getattr(made, into.name).update(facts)
        elif into.is_repeated:
            few = self.chance.choice((0, 1, 1, 2, 3, 8)) if self.chance.random() < 0.99 else 1100
            values = [self._value(into) for _ in range(few)]
            getattr(made, into.name).extend(values)
        elif into.message_type is not None:
            getattr(made, into.name).CopyFrom(self._value(into))
        else:
            setattr(made, into.name, self._value(into))

    def _value(self, into: FieldDescriptor) -> object:
        known = _KNOWN.get(into.name)
        if known is not None and self.chance.random() < 0.8:
            return known(self)
        if into.message_type is not None:
            if into.message_type.name == "Geometry" and self.chance.random() < 0.5:
                return OPENS[0].geometry
            return self.message(into.message_type)
        if into.type in BITS:
            return self.number(BITS[into.type])
        if into.type == FieldDescriptor.TYPE_STRING:
            return self.text()
        if into.type == FieldDescriptor.TYPE_BYTES:
            return self.junk()
        if into.type == FieldDescriptor.TYPE_DOUBLE:
            return self.seconds()
        return self.chance.random() < 0.5

    def op(self) -> pb.Op:
        """An operation of a session, in dram or in a pool; mostly one that makes some sense."""
        if self.chance.random() < 0.25:
            return self.any_of(pb.Op)
        op = self._sensible_op()
        op.pool = self.chance.choice((0, 0, 0, 0, 1, 1, 2, 7))
        return op

    def _sensible_op(self) -> pb.Op:
        number, namespace = self.chance.randint(1, 12), self.chance.choice(self.namespaces)
        group = self.chance.choice(("", "", "g1", "g2", "g3"))
        match self.chance.randrange(6):
            case 0:
                where: dict[str, Any] = {"group": group} if group else {"namespace_id": namespace}
                return pb.Op(acquire=pb.Acquire(lease=number, hashes=self.hashes(), timeout_s=self.chance.choice((0.0, 0.05)), **where))
            case 1:
                return pb.Op(claim=pb.Claim(lease=number, group=group, namespace_id=namespace))
            case 2:
                return requests.reserve(number, namespace, count=self.chance.randint(1, 12))
            case 3:
                return requests.reserve(number, namespace, hashes=self.hashes())
            case 4:
                return self._commit(number, namespace)
            case _:
                return self._give_back(number)

    def _commit(self, lease: int, namespace: int) -> pb.Op:
        """Of slots it has or had, of another's, of one slot twice; under keys of its own, once or twice, in a chain or in a circle."""
        slots = self.chance.choices(self.slots[-12:], k=self.chance.randint(1, 6))
        keys = self.chance.choices(self.keys, k=len(slots))
        parents = self.chance.choice(([keys[-1]], [bytes(32), *keys[:-1]], self.chance.choices(self.keys, k=len(slots))))
        units, generations = (b"".join(slot[which].to_bytes(4, "little") for slot in slots) for which in (0, 1))
        checksums = self.chance.choice((b"", b"", self.chance.randbytes(16 * len(slots))))
        commit = pb.Commit(lease=lease, namespace_id=namespace, units=units, generations=generations, hashes=b"".join(keys))
        commit.parents, commit.checksums = b"".join(parents), checksums
        commit.token_ids = self.chance.choice((b"", b"", self.chance.randbytes(4 * GEOMETRY.block_tokens * len(slots))))
        return pb.Op(commit=commit)

    def _give_back(self, number: int) -> pb.Op:
        if self.chance.random() < 0.5:
            return requests.release(number, self.chance.choice((0, 0, 1, 3)))
        slots = self.chance.choices(self.slots[-12:], k=self.chance.randint(0, 6))
        units, generations = (b"".join(slot[which].to_bytes(4, "little") for slot in slots) for which in (0, 1))
        return pb.Op(abandon=pb.Abandon(reservation=number, units=units, generations=generations))

    def mutated(self, message: Message) -> bytes:
        """A message's bytes, damaged."""
        data = bytearray(message.SerializeToString())
        for _ in range(self.chance.randint(1, 4)):
            at = self.chance.randrange(len(data) + 1)
            match self.chance.randrange(5):
                case 0 if at < len(data):
                    data[at] ^= 1 << self.chance.randrange(8)
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = self.chance.randbytes(self.chance.randint(1, 9))
                case 3:
                    data += data[:at]
                case _:
                    del data[at : at + self.chance.randint(1, 9)]
        return bytes(data)


# By a field's name: what belongs there.
_KNOWN: dict[str, Callable[[Words], object]] = {
    "epoch": lambda words: words.epoch,
    "namespace_id": lambda words: words.chance.choice(words.namespaces),
    "namespace_ids": lambda words: words.chance.choice(words.namespaces),
    "session": lambda words: words.chance.choice(words.sessions),
    "resume_session": lambda words: words.chance.choice([0, 0, *words.sessions]),
    "resume_token": lambda words: words.chance.choice(words.tokens),
    "group": lambda words: words.chance.choice(("", "", "g1", "g2", "g3")),
    "lease": lambda words: words.chance.randint(1, 12),
    "reservation": lambda words: words.chance.randint(1, 12),
    "keep_blocks": lambda words: words.chance.randint(0, 4),
    "count": lambda words: words.chance.choice((0, 0, 1, 2, 5, 40)),
    "guarantee_bytes": lambda words: words.chance.choice((0, 0, 0, 4096, 1 << 20, 1 << 40)),
    "limit_bytes": lambda words: words.chance.choice((0, 0, 4096, 1 << 20)),
    "timeout_s": lambda words: words.chance.choice((0.0, 0.01, 0.05)),
    "hashes": Words.hashes,
    "parents": Words.hashes,
    "hash": lambda words: words.chance.choice(words.keys),
    "parent": lambda words: words.chance.choice(words.keys),
    "units": lambda words: words.packed_words(0),
    "generations": lambda words: words.packed_words(1),
    "token_ids": lambda words: words.chance.choice((b"", words.junk(), words.chance.randbytes(4 * words.chance.randint(1, 300)))),
    "root": lambda words: words.chance.choice(words.keys),
    "checksums": lambda words: words.chance.choice((b"", b"", words.junk())),
    "shard": lambda words: words.chance.choice(("tp0/2", "tp0/2", "tp1/2", words.text())),
    "kv_group": lambda words: words.chance.choice(("", "", "", "sliding", "full")),
    "keep": lambda words: words.chance.choice([each.keep for each in OPENS]),
}
