"""What clients of the simulation store: three namespaces, and the chains of a small tree of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random

from kvstore.clients.requests import KEEP_ALL, Keep, open_namespace
from kvstore.geometry import Geometry
from kvstore.hashing import Identity, block_hash, fingerprint
from kvstore.proto import kvstore_pb2 as pb

BLOCK_TOKENS = 4
WINDOW_BLOCKS = 2
DEEPEST = 4  # blocks
BRANCHES = 2  # a node of the tree has so many children

IDENTITY = Identity(model="simulated", dtype="float32")
ROOT = fingerprint(IDENTITY)

Path = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """A namespace: how large its blocks are, and what it keeps."""

    name: str
    block_bytes: int
    keep: Keep = KEEP_ALL
    head_dim: int = 0  # of a kv1 block, which may have tails; 0: the bytes are opaque

    @property
    def geometry(self) -> Geometry:
        if self.head_dim:
            return Geometry("mha", 1, 1, self.head_dim, self.head_dim, "float32", BLOCK_TOKENS)
        return Geometry("mha", 1, 1, 1, 1, "float32", BLOCK_TOKENS, f"simulated-{self.name}", opaque_block_bytes=self.block_bytes)

    def request(self, tails: bool) -> pb.OpenNamespaceRequest:
        """What opens it; with tails, where it can have them."""
        return open_namespace(IDENTITY, self.geometry, "", self.name, self.keep, tails and self.head_dim > 0)


SMALL = Kind("small", 1504, head_dim=47)  # one unit
LARGE = Kind("large", 5000)  # two units
WINDOW = Kind("window", 1500, Keep("window", WINDOW_BLOCKS * BLOCK_TOKENS))
KINDS = (SMALL, LARGE, WINDOW)


_PATHS: dict[bytes, Path] = {}


def tokens_of(path: Path) -> list[int]:
    """The tokens of a path: each word is a block, and the blocks of two words begin with some of the same tokens."""
    return [token for word in path for token in ([1000, 1001, 1002, word] if word < BRANCHES else [1000, word, word, word])]


@cache
def chain(path: Path) -> tuple[bytes, ...]:
    """The block hashes of a path's prefix. The same in every namespace."""
    if not path:
        return ()
    above = chain(path[:-1])
    key = block_hash(above[-1] if above else ROOT, tokens_of(path[-1:]))
    _PATHS[key] = path
    return (*above, key)


def path_of(key: bytes) -> Path:
    """The path that this hash is the last of."""
    return _PATHS[key]


def some_path(chance: Random) -> Path:
    """A prompt: mostly from the small tree, sometimes one that nobody asks for again."""
    first = chance.randrange(100, 120) if chance.random() < 0.15 else chance.randrange(BRANCHES)
    return (first, *(chance.randrange(BRANCHES) for _ in range(chance.randrange(DEEPEST))))


def every_path() -> list[tuple[int, ...]]:
    """The deepest paths of the small tree: together they pass through every block of it."""
    return list(product(range(BRANCHES), repeat=DEEPEST))
