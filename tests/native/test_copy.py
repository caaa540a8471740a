"""Copies past the caches leave the bytes that were there, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.native.copy import copier
from kvstore.native.library import address, unlocked_library

needs_library = pytest.mark.skipif(unlocked_library() is None, reason="the compiled library was not built, or is switched off")
LARGEST = 9000  # bytes: many lines in each of its streams, and a rest


@needs_library
@pytest.mark.parametrize("size", [0, 1, 63, 64, 255, 256, 319, 320, 321, 4096, 4097, LARGEST - 200])
def test_every_place_and_length_is_copied_whole(size: int) -> None:
    """Wherever target and source lie in a cache line."""
    source = np.random.default_rng(size).integers(1, 256, LARGEST, np.uint8)
    for to in range(0, 130, 7):
        for at in (0, 1, 16, 33, 64):
            target = np.zeros(LARGEST, np.uint8)
            copier()(address(target) + to, address(source) + at, size)
            assert np.array_equal(target[to : to + size], source[at : at + size])
            assert not target[:to].any()
            assert not target[to + size :].any()
