"""The checksum that follows a block through every tier and over the network."""

import xxhash

_LOW_64 = (1 << 64) - 1  # bits of the low word


def block_checksum(namespace_digest: bytes, block_hash: bytes, data: memoryview) -> tuple[int, int]:
    """xxh3-128 over namespace digest ‖ block hash ‖ bytes, as (low, high) 64-bit words.

    data   exactly the block's bytes, without the padding of its slot; contiguous
    The key is part of it, so that right bytes under a wrong key do not pass. Safe in threads: python-xxhash lets the
    interpreter go on while it reads large buffers (measured with 4.1: another thread keeps its full speed meanwhile).
    """
    state = xxhash.xxh3_128(namespace_digest + block_hash)
    state.update(data)
    value = state.intdigest()
    return value & _LOW_64, value >> 64
