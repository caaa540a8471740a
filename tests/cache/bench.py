"""One session on one namespace with tails, for tests of a few prompts."""

from __future__ import annotations

import numpy as np

from kvstore.cache.core import Cache
from kvstore.cache.invariants import violations
from kvstore.cache.messages import (
    ALL_BLOCKS,
    Abandon,
    Acquire,
    Acquired,
    Attach,
    Commit,
    Committed,
    NamespaceSpec,
    Prompt,
    Refused,
    Release,
    Reserve,
    Reserved,
    unpack_hashes,
)
from kvstore.cache.state import CacheSizes
from kvstore.hashing import block_hashes, usable_blocks

UNIT = 4096
ROOT = b"r" * 32
SIZE = 4  # tokens a block


class Bench:
    """One session on one namespace with tails, and what it asks for most."""

    def __init__(self, blocks: int = 64, size: int = SIZE, tails: bool = True, index_blocks: int = 0, nvme_blocks: int = 0) -> None:
        self.size, self.leases = size, 0
        self.cache = Cache(CacheSizes(blocks * UNIT, nvme_blocks * UNIT, blocks * UNIT, nvme_blocks * UNIT, index_blocks))
        self.cache.open_namespace(NamespaceSpec("t", bytes(32), 1, UNIT, ALL_BLOCKS, size, tails))
        self.cache.attach(Attach(1, "t"), 0.0)

    def put(self, prompt: list[int], tokens: list[int] | None = None, bare: bool = False, parent: bytes = ROOT) -> Committed | Refused:
        """Store a prompt's whole blocks, with their tokens or other ones."""
        hashes = unpack_hashes(block_hashes(ROOT, prompt, self.size))
        slots = self.cache.reserve(Reserve(1, 1, 1, len(hashes)))
        assert isinstance(slots, Reserved)
        ids = np.array(prompt if tokens is None else tokens, np.uint32)[: len(hashes) * self.size]
        self.leases += 1
        request = Commit(1, self.leases, 1, slots.units, slots.generations, hashes, unpack_hashes(parent), tokens=None if bare else ids)
        done = self.cache.commit(request)
        self.cache.release(Release(1, self.leases))
        self.cache.abandon(Abandon(1, 1))  # what existed already
        self.cache.drain()
        return done

    def get(self, prompt: list[int], release: bool = True) -> tuple[int, int]:
        """(whole blocks, tokens of the tail)."""
        answer = self.ask(prompt)
        assert isinstance(answer, Acquired)
        self.cache.drain()
        if release:
            self.cache.release(Release(1, self.leases))
        return answer.expected - (answer.tail_tokens > 0), answer.tail_tokens

    def ask(self, prompt: list[int]) -> Acquired | Refused:
        usable = usable_blocks(len(prompt), self.size)
        hashes = unpack_hashes(block_hashes(ROOT, prompt[: usable * self.size], self.size))
        self.leases += 1
        return self.cache.acquire(Acquire(1, self.leases, hashes, 1.0, 1, prompt=Prompt(ROOT, np.array(prompt, np.uint32))), 0.0)

    def check(self) -> None:
        self.cache.drain()
        assert violations(self.cache.state) == []
