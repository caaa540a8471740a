"""Blocks whose bytes follow from their key, at every place of them, so that any byte of another block or of another place shows."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from kvstore.geometry import Geometry
from tests.blocks import GEOMETRY

ODD = Geometry("mha", 1, 1, 1, 1, "uint8", 16, format="test", opaque_block_bytes=10_000)  # a slot of 12 KiB, its end padding
GEOMETRIES = (GEOMETRY, ODD)
CHAIN_BLOCKS = 12  # blocks of every chain here


def chain(seed: int, blocks: int = CHAIN_BLOCKS) -> list[bytes]:
    """The hashes of one chain."""
    return [hashlib.sha256(f"{seed}/{index}".encode()).digest() for index in range(blocks)]


def bytes_of(key: bytes, size_bytes: int) -> NDArray[np.uint8]:
    """What the block of this key holds."""
    return np.frombuffer(hashlib.shake_128(key).digest(size_bytes), np.uint8)
