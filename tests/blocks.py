"""Blocks that tests store: a small model, chains of tokens, and bytes that name their block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.geometry import Geometry
from kvstore.hashing import HASH_BYTES, Identity, block_hashes, fingerprint

BLOCK_TOKENS = 16  # tokens
IDENTITY = Identity(model="tests/small", revision="1", tokenizer="none", position="{}", dtype="bfloat16")
GEOMETRY = Geometry("mha", 2, 2, 64, 64, "bfloat16", BLOCK_TOKENS)  # 16 KiB a block


def tokens_of(seed: int, blocks: int, extra: int = 1) -> list[int]:
    """A prompt of so many full blocks and `extra` tokens; another seed, another prompt."""
    return [seed * 1_000_003 + at for at in range(blocks * BLOCK_TOKENS + extra)]


def chain(seed: int, blocks: int, identity: Identity = IDENTITY) -> bytes:
    """The packed hashes of that prompt."""
    return block_hashes(fingerprint(identity), tokens_of(seed, blocks), BLOCK_TOKENS)


def pattern(block_hash: bytes, size_bytes: int = GEOMETRY.block_bytes) -> NDArray[np.uint8]:
    """Bytes that only this block has: its hash, over and over."""
    return np.resize(np.frombuffer(block_hash, np.uint8), size_bytes)


def each_hash(hashes: bytes) -> list[bytes]:
    """The hashes one by one."""
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]


def right(views: Sequence[NDArray[np.uint8]], hashes: bytes) -> bool:
    """Every view holds the bytes of its own block."""
    return all(np.array_equal(view, pattern(key)) for view, key in zip(views, each_hash(hashes), strict=False))
