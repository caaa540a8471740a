"""What every tier of bytes must do. Subclass `TierContract`, give it `make_tier`, and pytest runs it.

class TestMyTier(TierContract):
    def make_tier(self, directory: Path) -> ByteTier:
        return MyTier(directory, capacity_bytes=self.CAPACITY_BYTES)
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgument, Unavailable
from kvstore.geometry import UNIT_BYTES
from kvstore.tiers.base import ByteTier, HealthState

THREADS = 8  # threads: more than any tier has lanes by default
WAIT_S = 60.0  # seconds: far beyond what any of this takes


def aligned(size_bytes: int, fill: int = 0) -> memoryview:
    """Writable memory that begins on a page, as slots do."""
    memory = memoryview(mmap.mmap(-1, size_bytes))
    memory[:] = bytes([fill]) * size_bytes
    return memory


def pattern(key: int, size_bytes: int) -> bytes:
    """Bytes that belong to `key` alone, different in every 8 of them."""
    return b"".join((key << 32 | word).to_bytes(8, "little") for word in range(size_bytes // 8))


def filled(key: int, size_bytes: int) -> memoryview:
    """Aligned memory with `pattern(key)` in it."""
    memory = aligned(size_bytes)
    memory[:] = pattern(key, size_bytes)
    return memory


class TierContract:
    """The suite. `make_tier` gives an open tier of CAPACITY_BYTES whose files, if it has any, lie in the directory."""

    CAPACITY_BYTES = 64 * UNIT_BYTES

    def make_tier(self, directory: Path) -> ByteTier:
        """A new, empty tier."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[ByteTier]:
        """An open tier, closed after the test."""
        tier = self.make_tier(tmp_path)
        yield tier
        tier.close()

    def test_it_says_what_it_is_and_how_large(self, tier: ByteTier) -> None:
        assert tier.name
        assert tier.capacity_bytes == self.CAPACITY_BYTES
        assert tier.health().state in (HealthState.OK, HealthState.DEGRADED)

    def test_what_was_written_is_read_back(self, tier: ByteTier) -> None:
        for units, count in ((0, 1), (1, 1), (7, 9), (63, 1), (0, 64)):
            source, target = filled(units + count, count * UNIT_BYTES), aligned(count * UNIT_BYTES)
            tier.write(units * UNIT_BYTES, [source])
            tier.read(units * UNIT_BYTES, [target])
            assert target == source

    def test_several_buffers_are_one_range(self, tier: ByteTier) -> None:
        sources = [filled(key, (1 + key) * UNIT_BYTES) for key in range(3)]
        tier.write(4 * UNIT_BYTES, sources)
        whole = aligned(6 * UNIT_BYTES)
        tier.read(4 * UNIT_BYTES, [whole])
        assert bytes(whole) == b"".join(sources)
        parts = [aligned(3 * UNIT_BYTES), aligned(3 * UNIT_BYTES)]
        tier.read(4 * UNIT_BYTES, parts)
        assert b"".join(parts) == bytes(whole)

    def test_nothing_to_do_is_no_error(self, tier: ByteTier) -> None:
        tier.write(0, [])
        tier.read(UNIT_BYTES, [])

    def test_a_write_leaves_its_neighbours_alone(self, tier: ByteTier) -> None:
        tier.write(0, [filled(1, 3 * UNIT_BYTES)])
        tier.write(UNIT_BYTES, [filled(2, UNIT_BYTES)])
        whole = aligned(3 * UNIT_BYTES)
        tier.read(0, [whole])
        before = pattern(1, 3 * UNIT_BYTES)
        assert bytes(whole) == before[:UNIT_BYTES] + pattern(2, UNIT_BYTES) + before[2 * UNIT_BYTES :]

    def test_a_source_may_change_after_its_write(self, tier: ByteTier) -> None:
        source, target = filled(1, UNIT_BYTES), aligned(UNIT_BYTES)
        tier.write(0, [source])
        source[:] = pattern(2, UNIT_BYTES)
        tier.read(0, [target])
        assert bytes(target) == pattern(1, UNIT_BYTES)

    @pytest.mark.parametrize(("offset_bytes", "size_bytes"), [(1, UNIT_BYTES), (512, UNIT_BYTES), (0, 512), (0, UNIT_BYTES + 1)])
    def test_what_is_not_in_whole_units_is_refused(self, tier: ByteTier, offset_bytes: int, size_bytes: int) -> None:
        memory = aligned(size_bytes)
        with pytest.raises(InvalidArgument):
            tier.read(offset_bytes, [memory])
        with pytest.raises(InvalidArgument):
            tier.write(offset_bytes, [memory])

    @pytest.mark.parametrize("units", [-1, 63, 64, 1 << 40])
    def test_what_lies_outside_is_refused(self, tier: ByteTier, units: int) -> None:
        memory = aligned(2 * UNIT_BYTES)
        with pytest.raises(InvalidArgument):
            tier.read(units * UNIT_BYTES, [memory])
        with pytest.raises(InvalidArgument):
            tier.write(units * UNIT_BYTES, [memory])

    def test_threads_on_disjoint_ranges_do_not_mix(self, tier: ByteTier) -> None:
        share_bytes = self.CAPACITY_BYTES // THREADS // UNIT_BYTES * UNIT_BYTES
        together = threading.Barrier(THREADS)

        def rewrite(thread: int) -> None:
            target = aligned(share_bytes)
            together.wait(WAIT_S)
            for turn in range(20):
                tier.write(thread * share_bytes, [filled(thread * 1000 + turn, share_bytes)])
                tier.read(thread * share_bytes, [target])
                assert bytes(target) == pattern(thread * 1000 + turn, share_bytes)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(rewrite, range(THREADS), timeout=WAIT_S))

    def test_a_closed_tier_answers_nothing(self, tier: ByteTier) -> None:
        tier.close()
        tier.close()
        with pytest.raises(Unavailable):
            tier.read(0, [aligned(UNIT_BYTES)])
        with pytest.raises(Unavailable):
            tier.write(0, [aligned(UNIT_BYTES)])
        assert tier.health().state is HealthState.FAILED

    def test_closing_under_use_breaks_nothing(self, tier: ByteTier) -> None:
        begun = threading.Event()

        def use() -> None:
            memory = filled(1, 8 * UNIT_BYTES)
            while True:
                try:
                    tier.write(0, [memory])
                    tier.read(0, [memory])
                except Unavailable:
                    return
                begun.set()

        with ThreadPoolExecutor(2) as pool:
            users = [pool.submit(use) for _ in range(2)]
            assert begun.wait(WAIT_S)
            tier.close()
            for user in users:
                user.result(WAIT_S)
