"""A decode step's message to the store beside an empty one: the same session, the same stream, by turns."""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Iterator

import grpc
import numpy as np

from kvstore.bench.yardsticks import timed
from kvstore.clients import requests
from kvstore.clients.answers import Answer, Slotted
from kvstore.clients.channel import OPTIONS, target
from kvstore.clients.link import Link, Unmapped
from kvstore.geometry import Geometry
from kvstore.hashing import HASH_BYTES, Identity, fingerprint
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub

SEQUENCES = 16  # sequences whose block is full in one step: of 128 that decode, with blocks of 16 tokens, it is 8 on average
STEPS = 200  # of each kind
WARM_STEPS = 20  # steps before those that count: code's and memory's first time
ANSWER_S = 10.0  # seconds: far beyond what an answer takes
GEOMETRY = Geometry("mha", 1, 1, 1, 1, "uint8", 16, format="bench", opaque_block_bytes=4096)


class Decoding:
    """A session with so many sequences: in each step every one commits the block that it has filled, asks for one, lets one go."""

    def __init__(self, address: str) -> None:
        place = target(address)
        self._channel = grpc.insecure_channel(place, OPTIONS)
        stub = KVStoreStub(self._channel)
        self._link = Link(stub, place, requests.hello("bench", 0, 0))
        opened = self._link.open()
        if isinstance(opened, Unmapped):
            raise opened.error
        identity = Identity(model="bench", revision="step", dtype="uint8")
        opening = requests.open_namespace(identity, GEOMETRY, "", "", requests.KEEP_ALL)
        self._namespace: int = stub.OpenNamespace(opening, timeout=ANSWER_S).namespace_id
        self._numbers = itertools.count(1)
        self._last = [fingerprint(identity)] * SEQUENCES
        self._slots = [self._slot(answer) for answer in self._ask([self._reserve() for _ in range(SEQUENCES)])]
        self._leases: list[int] = []

    def empty_s(self) -> float:
        """Seconds of a round trip that asks for nothing: a lease is let go that does not exist."""
        nothing = [requests.release(0)]
        return timed(lambda: self._ask(nothing))

    def step_s(self) -> float:
        """Seconds of one step's message: so many reserves, commits and releases."""
        ops, leases = [self._reserve() for _ in range(SEQUENCES)], []
        for sequence, slot in enumerate(self._slots):
            leases.append(next(self._numbers))
            made = os.urandom(HASH_BYTES)
            arrays = np.array([slot[0]], np.uint32), np.array([slot[1]], np.uint32)
            ops.append(requests.commit(leases[-1], self._namespace, arrays, made, self._last[sequence]))
            self._last[sequence] = made
        ops += [requests.release(lease) for lease in self._leases]
        answers: list[Answer] = []
        seconds = timed(lambda: answers.extend(self._ask(ops)))
        self._slots, self._leases = [self._slot(answer) for answer in answers[:SEQUENCES]], leases
        return seconds

    def close(self) -> None:
        """End the session."""
        self._link.close()
        self._channel.close()

    def _ask(self, ops: list[pb.Op]) -> list[Answer]:
        return self._link.ask(ops, ANSWER_S)

    def _reserve(self) -> pb.Op:
        return requests.reserve(next(self._numbers), self._namespace, count=1)

    def _slot(self, answer: Answer) -> tuple[int, int]:
        if not isinstance(answer, Slotted) or not len(answer.units):
            raise RuntimeError(f"no slot was granted: {answer}")
        return int(answer.units[0]), int(answer.generations[0])


def step_figures(address: str) -> dict[str, float]:
    """step_p50_ms, round_trip_p50_ms, and their ratio, step_ratio."""
    decoding = Decoding(address)
    pairs = list(itertools.islice(_pairs(decoding), STEPS))
    decoding.close()
    empty, step = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
    return {"round_trip_p50_ms": round(empty, 3), "step_p50_ms": round(step, 3), "step_ratio": round(step / empty, 2)}


def _pairs(decoding: Decoding) -> Iterator[tuple[float, float]]:
    for _ in range(WARM_STEPS):
        decoding.step_s()
    while True:
        yield decoding.empty_s(), decoding.step_s()
