"""Loops over records in C do what their twins in numpy do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.native import records
from kvstore.native.library import library
from kvstore.native.records import WordSet, take_fields
from kvstore.tiers import record_codec as codec
from kvstore.tiers.nvme_records import FIELDS

needs_library = pytest.mark.skipif(library() is None, reason="the compiled library was not built, or is switched off")
words = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)), max_size=80)


def without_library(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "library", lambda: None)


@needs_library
@given(st.lists(words, max_size=4))
def test_both_know_which_words_are_new(batches: list[list[int]]) -> None:
    """Zero among them, which in the table means an empty place."""
    room = sum(map(len, batches))
    compiled = WordSet(room)
    with pytest.MonkeyPatch.context() as patch:
        without_library(patch)
        plain = WordSet(room)
    seen: set[int] = set()
    for batch in batches:
        packed = np.array(batch, np.uint64)
        new = [word not in seen and not seen.add(word) for word in batch]  # type: ignore[func-returns-value]
        assert compiled.note(packed).tolist() == plain.note(packed).tolist() == new


@needs_library
@given(st.binary(min_size=3 * codec.RECORD_BYTES, max_size=3 * codec.RECORD_BYTES), st.lists(st.integers(0, 2), max_size=9))
def test_both_take_the_same_fields(data: bytes, order: list[int]) -> None:
    found = np.frombuffer(data, codec.RECORD)
    numbers = np.array(order, np.int64)
    compiled = take_fields(found, numbers, FIELDS)
    with pytest.MonkeyPatch.context() as patch:
        without_library(patch)
        plain = take_fields(found, numbers, FIELDS)
    for one, other in zip(compiled, plain, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()
