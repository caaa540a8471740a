"""A snapshot is sent in pieces, and the cache goes on meanwhile: no piece may say what is not so."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvstore.cache import core
from kvstore.cache.core import Cache
from kvstore.cache.messages import Attach, Commit, Committed, NamespaceSpec, Release, Reserve, Reserved, unpack_hashes
from kvstore.cache.state import CacheSizes

BLOCKS = 400
PIECE = 64  # blocks


def keys(seed: int) -> list[bytes]:
    return [hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(BLOCKS)]


def store(cache: Cache, namespace: int, seed: int) -> None:
    hashes = unpack_hashes(b"".join(keys(seed)))
    slots = cache.reserve(Reserve(1, seed, namespace, BLOCKS))
    assert isinstance(slots, Reserved)
    done = cache.commit(Commit(1, seed, namespace, slots.units, slots.generations, hashes, unpack_hashes(bytes(32))))
    assert isinstance(done, Committed)
    cache.release(Release(1, seed))
    cache.drain()


def test_a_piece_has_only_blocks_that_are_there_and_of_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "SNAPSHOT_ROWS", PIECE)
    cache = Cache(CacheSizes(8 << 20, index_blocks=BLOCKS + 10))  # so few rows that those of the first namespace are used again
    for name in (b"a", b"b"):
        cache.open_namespace(NamespaceSpec("default", name * 32, 1, 4096))
    cache.attach(Attach(1, "default"), 0.0)
    store(cache, 1, 1)
    pieces = cache.snapshot(1)
    ((_, first, _),) = next(pieces)
    assert len(first) == 32 * (PIECE - 1)  # the fingerprint has a row too
    cache.clear(1, (1,))
    store(cache, 2, 2)
    rest = b"".join(hashes for piece in pieces for _, hashes, _ in piece)
    assert not {rest[start : start + 32] for start in range(0, len(rest), 32)} & set(keys(2))
    assert rest == b""


def test_a_snapshot_of_a_quiet_cache_has_every_block_once_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "SNAPSHOT_ROWS", PIECE)
    cache = Cache(CacheSizes(8 << 20))
    cache.open_namespace(NamespaceSpec("default", bytes(32), 1, 4096))
    cache.attach(Attach(1, "default"), 0.0)
    store(cache, 1, 1)
    found = [each for piece in cache.snapshot(1) for each in piece]
    hashes = unpack_hashes(b"".join(each for _, each, _ in found))
    parents = unpack_hashes(b"".join(each for _, _, each in found))
    known = {key.tobytes(): parent.tobytes() for key, parent in zip(hashes, parents, strict=True)}
    assert known == dict(zip(keys(1), [bytes(32), *keys(1)], strict=False))
    assert len(np.unique(hashes, axis=0)) == len(hashes) == BLOCKS
