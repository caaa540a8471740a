"""The chain of block hashes in C; see chain.c. Its twin, with hashlib, is in kvstore/hashing.py."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from itertools import accumulate

import numpy as np

from kvstore.native.library import address, library

HASH_BYTES = 32  # as in chain.c
MAX_BLOCK_TOKENS = 2**32 - 1  # tokens: the hash names their number with 32 bits

Chain = Callable[[bytes, bytes, int, int, bytes | None, int | None, int, int], None]


@functools.cache
def _compiled() -> Chain | None:
    found = library()
    if found is None:
        return None
    chain = found.kvstore_chain
    pointer, many, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    chain.argtypes = (ctypes.c_char_p, ctypes.c_char_p, many, ctypes.c_uint32, ctypes.c_char_p, pointer, number, pointer)
    chain.restype = None
    return chain


def chain_hashes(root: bytes, tokens: bytes, block_tokens: int, extras: Mapping[int, bytes], *, plain: bool = False) -> bytes | None:
    """The packed hashes of all full blocks, 32 bytes each; None without the library.

    root      32 bytes;  tokens  ids as little-endian 32-bit numbers
    extras    what follows the tokens of a block, by block;  plain  without the processor's own instructions for SHA-256
    """
    compiled = _compiled()
    if compiled is None or block_tokens > MAX_BLOCK_TOKENS:
        return None
    blocks = len(tokens) // (4 * block_tokens)
    hashes = np.empty(HASH_BYTES * blocks, np.uint8)
    if not extras:
        compiled(root, tokens, blocks, block_tokens, None, None, plain, address(hashes))
        return hashes.tobytes()
    pieces = [extras.get(block, b"") for block in range(blocks)]
    starts = np.fromiter(accumulate(map(len, pieces), initial=0), np.int64, blocks + 1)
    compiled(root, tokens, blocks, block_tokens, b"".join(pieces), address(starts), plain, address(hashes))
    return hashes.tobytes()
