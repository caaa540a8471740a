"""Bits that C sets are those that numpy sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.native.bits import _mark, marker
from kvstore.native.library import library

BITS = 320


@given(st.lists(st.integers(0, BITS - 1), max_size=80), st.lists(st.integers(0, BITS - 1), max_size=80))
def test_what_is_set_and_what_is_cleared(on: list[int], off: list[int]) -> None:
    marked = [np.zeros(BITS // 8, np.uint8), np.zeros(BITS // 8, np.uint8)]
    for bits, mark in zip(marked, (marker(), _mark), strict=True):
        mark(bits, np.array(on, np.uint32), True)
        mark(bits, np.array(off, np.uint32), False)
        assert np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist() == sorted(set(on) - set(off))
    assert marked[0].tolist() == marked[1].tolist()


@pytest.mark.skipif(library() is None, reason="numpy says so by itself")
def test_a_bit_past_the_end_is_refused() -> None:
    with pytest.raises(IndexError, match="bit 320"):
        marker()(np.zeros(BITS // 8, np.uint8), np.array([BITS], np.uint32), True)
