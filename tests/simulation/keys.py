"""What clients of the simulation store: three namespaces, and the chains of a small tree of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import product
from random import Random

from kvstore.clients.requests import KEEP_ALL, Keep, open_namespace
from kvstore.geometry import Geometry
from kvstore.hashing import Identity, fingerprint
from kvstore.proto import kvstore_pb2 as pb

BLOCK_TOKENS = 4
WINDOW_BLOCKS = 2
DEEPEST = 4  # blocks
BRANCHES = 2  # a node of the tree has so many children

IDENTITY = Identity(model="simulated", dtype="float32")
ROOT = fingerprint(IDENTITY)


@dataclass(frozen=True)
class Kind:
    """A namespace: how large its blocks are, and what it keeps."""

    name: str
    block_bytes: int
    keep: Keep = KEEP_ALL

    @property
    def geometry(self) -> Geometry:
        return Geometry("mha", 1, 1, 1, 1, "float32", BLOCK_TOKENS, f"simulated-{self.name}", opaque_block_bytes=self.block_bytes)

    @property
    def request(self) -> pb.OpenNamespaceRequest:
        return open_namespace(IDENTITY, self.geometry, "", self.name, self.keep)


SMALL = Kind("small", 1500)  # one unit
LARGE = Kind("large", 5000)  # two units
WINDOW = Kind("window", 1500, Keep("window", WINDOW_BLOCKS * BLOCK_TOKENS))
KINDS = (SMALL, LARGE, WINDOW)


@cache
def chain(path: tuple[int, ...]) -> tuple[bytes, ...]:
    """The block hashes of a path's prefix. The same in every namespace."""
    return tuple(sha256(repr(path[: i + 1]).encode()).digest() for i in range(len(path)))


def some_path(chance: Random) -> tuple[int, ...]:
    """A prompt: mostly from the small tree, sometimes one that nobody asks for again."""
    first = chance.randrange(100, 120) if chance.random() < 0.15 else chance.randrange(BRANCHES)
    return (first, *(chance.randrange(BRANCHES) for _ in range(chance.randrange(DEEPEST))))


def every_path() -> list[tuple[int, ...]]:
    """The deepest paths of the small tree: together they pass through every block of it."""
    return list(product(range(BRANCHES), repeat=DEEPEST))
