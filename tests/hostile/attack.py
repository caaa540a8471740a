"""A process that attacks a daemon from several threads: `python -m tests.hostile.attack ADDRESS SEED MESSAGES`.

Random and damaged messages to every call, streams in any order, bytes that are no HTTP/2. It answers with one line of JSON: how many
messages were sent, with which statuses they were answered, and every answer that no input may get: a fault of the daemon's own, or none
in time.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor

from kvstore.checksum import block_checksum
from kvstore.clients.channel import OPTIONS
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub
from tests.blocks import GEOMETRY, pattern
from tests.hostile import garbage
from tests.hostile.intruder import Intruder
from tests.hostile.words import OPENS, Words

THREADS = 6
SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"]
ANSWER_S = 20.0  # seconds: whoever waits longer was forgotten
WATCH_S = 0.05  # seconds of a watch, which has no end of its own
CLEAR_SHARE = 0.05  # of the calls of Clear: those that may reach what is not the attackers'
NEVER = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)  # no input may be answered so
PASSING = "of a process that has ended is being given back"  # but here: another one's end, which is over in a moment


class Attack:
    """One thread's. Everything in `faults` is the daemon's."""

    def __init__(self, address: str, seed: int) -> None:
        self.messages = 0
        self.statuses: Counter[str] = Counter()
        self.faults: list[str] = []
        self._address = address
        self._chance = random.Random(seed)
        self._words = Words(self._chance)
        self._channel = grpc.insecure_channel(f"unix:{address}", [*OPTIONS, ("grpc.use_local_subchannel_pool", 1)])
        self._digest = b""

    def run(self, messages: int) -> None:
        """Until so many are sent."""
        self._look_around()
        ways: dict[Callable[[], None], float] = {self._call: 0.5, self._intrude: 0.4, self._write: 0.07, self._garbage: 0.03}
        while self.messages < messages and len(self.faults) < 20:
            self._chance.choices(list(ways), list(ways.values()))[0]()
        self._channel.close()

    def _look_around(self) -> None:
        stub = KVStoreStub(self._channel)
        replies = [stub.OpenNamespace(request, timeout=ANSWER_S, wait_for_ready=True) for request in OPENS]
        self._words.epoch, self._digest = replies[0].epoch, replies[0].digest
        self._words.namespaces = [reply.namespace_id for reply in replies]

    # ---- the ways

    def _call(self) -> None:
        """Any call with one request."""
        methods = [method for method in SERVICE.methods if not method.client_streaming]
        for _ in range(self._chance.randint(1, 20)):
            method = self._chance.choice(methods)
            self.messages += 1
            if method.server_streaming:
                self._counted(method.name, partial(self._streamed, method))
            else:
                self._counted(method.name, partial(self._asked, method))

    def _asked(self, method: MethodDescriptor) -> None:
        call: Any = self._channel.unary_unary(f"/{SERVICE.full_name}/{method.name}")
        call(self._request(method), timeout=ANSWER_S)

    def _streamed(self, method: MethodDescriptor) -> None:
        endless = method.name == "Watch"
        call: Any = self._channel.unary_stream(f"/{SERVICE.full_name}/{method.name}")
        stream = call(self._request(method), timeout=WATCH_S if endless else ANSWER_S)
        try:
            for number, _ in enumerate(stream):
                if number > self._chance.randint(0, 40):
                    return
        except grpc.RpcError as error:
            if not (endless and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
        finally:
            stream.cancel()

    def _request(self, method: MethodDescriptor) -> bytes:
        message = self._words.message(method.input_type)
        if isinstance(message, pb.ClearRequest) and self._chance.random() > CLEAR_SHARE:
            message.namespace_id, message.epoch = self._words.namespaces[0], self._words.epoch
            return message.SerializeToString()
        if isinstance(message, pb.ClearRequest) or self._chance.random() < 0.7:
            return message.SerializeToString()
        return self._words.mutated(message)

    def _write(self) -> None:
        """Blocks in pieces: right ones, and with every kind of mistake in them."""
        sent = list(self._pieces())
        self.messages += len(sent)
        call: Any = self._channel.stream_unary(f"/{SERVICE.full_name}/Write")
        self._counted("Write", lambda: call(iter(sent), timeout=ANSWER_S))

    def _pieces(self) -> Iterator[bytes]:
        words, chance = self._words, self._chance
        for _ in range(chance.randint(1, 3)):
            key = chance.choice(words.keys)
            data = pattern(key).tobytes()
            checksum = b"".join(half.to_bytes(8, "little") for half in block_checksum(self._digest, key, memoryview(data)))
            step = chance.choice((GEOMETRY.block_bytes, 4096, 5000))
            for start in range(0, len(data), step):
                last = start + step >= len(data)
                piece = pb.BlockBytes(namespace_id=words.namespaces[0], epoch=words.epoch, hash=key, parent=bytes(32), offset_bytes=start)
                piece.data, piece.last, piece.checksum = data[start : start + step], last, checksum if last else b""
                if chance.random() < 0.1:
                    piece.MergeFrom(words.any_of(pb.BlockBytes))
                yield words.mutated(piece) if chance.random() < 0.03 else piece.SerializeToString()

    def _intrude(self) -> None:
        intruder = Intruder(self._channel, self._words)
        try:
            intruder.visit()
        finally:
            self.messages += intruder.messages
            self.statuses.update(intruder.answers)
            self.faults += intruder.faults

    def _garbage(self) -> None:
        self.messages += 1
        self.statuses[garbage.throw(self._address, self._chance)] += 1

    # ----

    def _counted(self, name: str, act: Callable[[], object]) -> None:
        code = grpc.StatusCode.OK
        try:
            act()
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED and ": " not in (error.details() or ""):
                self.faults.append(f"{name}: {error.details()}")
            late = code is grpc.StatusCode.DEADLINE_EXCEEDED and "DeadlineExceeded: " not in (error.details() or "")
            if (code in NEVER and PASSING not in (error.details() or "")) or late:
                self.faults.append(f"{name}: {code.name}: {error.details()}")
        self.statuses[f"{name} {code.name}"] += 1


def main() -> None:
    address, seed, messages = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    attacks = [Attack(address, seed * THREADS + number) for number in range(THREADS)]
    threads = [threading.Thread(target=attack.run, args=(messages // THREADS,)) for attack in attacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = sum((attack.statuses for attack in attacks), Counter[str]())
    faults = [fault for attack in attacks for fault in attack.faults]
    print(json.dumps({"messages": sum(attack.messages for attack in attacks), "statuses": statuses, "faults": faults}))


if __name__ == "__main__":
    main()
