"""A session that keeps no rule: messages in any order, operations that make no sense, ends of every kind."""

from __future__ import annotations

import fcntl
import os
import queue
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc

from kvstore.clients.handles import OUTCOME_NAMES
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub
from tests.hostile.words import Words

VISIT_S = 30.0  # seconds: a visit takes a fraction of one
MAX_MESSAGES = 120  # of one visit


class Intruder:
    """One Attach call. Every fault is the daemon's."""

    def __init__(self, channel: grpc.Channel, words: Words) -> None:
        self.messages = 0
        self.answers: Counter[str] = Counter()
        self.faults: list[str] = []
        self._words = words
        self._chance = words.chance
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        attach: Any = channel.stream_stream("/kvstore.v1.KVStore/Attach", response_deserializer=pb.ServerMessage.FromString)
        self._call = attach(iter(self._outgoing.get, None), timeout=VISIT_S)
        self._incoming: Iterator[pb.ServerMessage] = iter(self._call)
        self._stub = KVStoreStub(channel)
        self._lock = -1
        self._over = False

    def visit(self) -> None:
        """Come in somehow, do this and that, leave somehow."""
        try:
            self._come_in()
            while not self._over and self.messages < MAX_MESSAGES and self._chance.random() > 0.03:
                self._do_something()
            self._leave()
        except grpc.RpcError as error:
            self.answers[f"Attach {error.code().name}"] += 1
            self.faults.append(f"Attach: {error.code().name}: {error.details()}")
        finally:
            self._outgoing.put(None)
            self._call.cancel()
            if self._lock >= 0:
                os.close(self._lock)

    def _come_in(self) -> None:
        if self._chance.random() < 0.1:  # not as one should
            self._send(self._words.any_of(pb.ClientMessage))
        hello = pb.Hello(client=self._words.text(), maps_arena=self._chance.random() < 0.5)
        if hello.maps_arena:
            hello.pools.extend(pb.PoolTerms(uuid=f"gpu-{number}") for number in range(self._chance.randint(0, 2)))
        if self._chance.random() < 0.2:
            hello.MergeFrom(self._words.any_of(pb.Hello))
        self._send(pb.ClientMessage(hello=hello))
        if self._chance.random() < 0.05:
            return self._do_something()  # before Welcome and Ready
        welcome = self._receive()
        if welcome is None or not welcome.HasField("welcome"):
            return None
        self._words.sessions = [*self._words.sessions, welcome.welcome.session][-8:]
        self._words.tokens = [*self._words.tokens, welcome.welcome.resume_token][-8:]
        if welcome.welcome.session_path:
            if self._chance.random() < 0.9:
                self._lock = os.open(welcome.welcome.session_path, os.O_RDWR)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._send(pb.ClientMessage(locked=pb.Locked()))
        if self._receive() is not None and self._chance.random() < 0.5:
            self._join(welcome.welcome.session)
        return None

    def _join(self, session: int) -> None:
        """A group, or what is none."""
        words = self._words
        members = self._chance.choice((words.namespaces, words.namespaces[::-1], words.namespaces[:1] * 2, [], [0], words.namespaces[:2]))
        group = self._chance.choice(("g1", "g2", "g3", ""))
        request = pb.JoinGroupRequest(session=session, group=group, namespace_ids=members, epoch=words.epoch)
        self.messages += 1
        try:
            self._stub.JoinGroup(request, timeout=VISIT_S)
            self.answers["JoinGroup OK"] += 1
        except grpc.RpcError as error:
            self.answers[f"JoinGroup {error.code().name}"] += 1

    def _do_something(self) -> None:
        pick = self._chance.random()
        if pick < 0.02:
            self._send(self._words.any_of(pb.ClientMessage))
        elif pick < 0.03:
            self._outgoing.put(self._words.mutated(pb.ClientMessage(batch=self._batch())))
            self.messages += 1
        else:
            batches = [self._batch() for _ in range(self._chance.randint(1, 8))]
            for batch in batches:
                self._send(pb.ClientMessage(batch=batch))
            if self._chance.random() < 0.95:  # else it does not listen
                self._listen(batches[-1].number)

    def _batch(self) -> pb.Batch:
        ops = [self._words.op() for _ in range(self._chance.randint(1, 5))]
        if self._chance.random() < 0.005:
            ops = [pb.Op()] * self._chance.choice((0, 1025))
        return pb.Batch(number=self.messages + self._chance.randint(1, 1000), ops=ops)

    def _listen(self, number: int) -> None:
        """Until this batch is answered."""
        while (message := self._receive()) is not None:
            if message.HasField("reply") and message.reply.number == number:
                return

    def _receive(self) -> pb.ServerMessage | None:
        message = next(self._incoming, None)
        if message is None:
            self._over = True
            return None
        kind = message.WhichOneof("kind")
        self.answers[f"Attach {kind}"] += 1
        refused = [(reply.error.code, reply.error.text) for reply in message.reply.replies if reply.HasField("error")]
        refused += [(message.ended.code, message.ended.text)] if message.HasField("ended") else []
        self.faults += [f"Attach {kind}: {code}: {text}" for code, text in refused if code in ("INTERNAL", "UNKNOWN", "")]
        for reply in message.reply.replies:
            self._words.learn_slots(reply.slots.units, reply.slots.generations)
            self.answers.update(f"op {reply.WhichOneof('kind')} {OUTCOME_NAMES[outcome]}" for outcome in reply.slots.outcomes)
        return message

    def _leave(self) -> None:
        pick = self._chance.random()
        if self._over or pick < 0.4:
            return  # cut off
        if pick < 0.6:
            self._send(pb.ClientMessage(detach=pb.Detach()))
        self._outgoing.put(None)  # half-closed
        while self._receive() is not None:
            pass

    def _send(self, message: pb.ClientMessage) -> None:
        self.messages += 1
        self._outgoing.put(message.SerializeToString())
