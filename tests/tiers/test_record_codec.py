"""A record on disk is whole or is known not to be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers import record_codec as codec
from kvstore.tiers.record_codec import RECORD, RECORD_BYTES

BODIES = st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES)


def sealed(bodies: list[bytes]) -> codec.Records:
    return codec.seal(np.frombuffer(bytearray(b"".join(bodies)), dtype=RECORD))


@given(st.lists(BODIES, min_size=1, max_size=20))
def test_what_is_sealed_is_whole_and_unchanged(bodies: list[bytes]) -> None:
    before = np.frombuffer(b"".join(bodies), dtype=RECORD)
    records = np.frombuffer(bytes(codec.as_bytes(sealed(bodies))), dtype=RECORD)
    assert codec.intact(records).all()
    for name in set(RECORD.names or ()) - {"magic", "check"}:
        assert (records[name] == before[name]).all()


@given(BODIES, st.integers(0, RECORD_BYTES * 8 - 1))
def test_any_flipped_bit_shows(body: bytes, bit: int) -> None:
    raw = bytearray(codec.as_bytes(sealed([body])))
    raw[bit // 8] ^= 1 << bit % 8
    assert not codec.intact(np.frombuffer(raw, dtype=RECORD)).any()


@given(BODIES, BODIES, st.integers(1, RECORD_BYTES - 1))
def test_the_head_of_one_and_the_tail_of_another_show(old: bytes, new: bytes, cut: int) -> None:
    before, after = (bytes(codec.as_bytes(sealed([body]))) for body in (old, new))
    torn = after[:cut] + before[cut:]
    assert codec.intact(np.frombuffer(torn, dtype=RECORD)).any() == (torn in (before, after))


@given(st.permutations(range(15)))
def test_words_in_another_order_show(order: list[int]) -> None:
    words = codec.as_bytes(sealed([bytes(range(1, RECORD_BYTES + 1))])).cast("Q")
    moved = np.array([*(words[index] for index in order), words[15]], dtype="<u8").view(RECORD)
    assert codec.intact(moved).all() == (order == sorted(order))


def test_an_empty_record_is_blank_and_not_whole() -> None:
    assert codec.blank(codec.empty(3)).all()
    assert not codec.intact(codec.empty(3)).any()
    assert not codec.blank(codec.seal(codec.empty(1))).any()


def test_the_layout_on_disk_is_what_it_was() -> None:
    record = codec.empty(1)
    record[0] = (0, 1, 2, 3, (4, 5, 6, 7), (8, 9, 10, 11), 12, 13, 14, (15, 16), 17, 0)
    raw = bytes(codec.as_bytes(codec.seal(record)))
    assert len(raw) == RECORD_BYTES
    assert raw[:16] == b"KVR1" + bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])
    assert raw[-8:].hex() == "eef1f0936e996fa2"
