"""The background check: it comes by every block, is in nobody's way, and finds wrong bytes though nobody reads them."""

from __future__ import annotations

import pytest

from kvstore.cache.messages import Corrupted, FoundBy, Tier, TransferDone, TransferResult
from tests.cache.shop import Shop, stored
from tests.cache.world import UNIT, chain, summed


def test_a_pass_comes_by_every_block_in_every_tier() -> None:
    shop = stored()
    tiers = []
    while found := shop.scrub():
        tiers.append({each.tier for each in found})
        shop.finish_all()
        shop.pass_time(1.5)
    assert tiers == [{Tier.NVME}, {Tier.DRAM}]
    assert shop.counter("scrubbed_bytes") == 6 * UNIT
    stats = shop.cache.stats()
    assert (stats.scrub_passes, stats.scrub_pass_s) == (1, 3.0)


def test_a_pass_rests_until_the_next_is_due() -> None:
    shop = stored()
    while shop.scrub():
        shop.finish_all()
    shop.pass_time(49.0)
    assert shop.scrub() == []
    shop.pass_time(2.0)
    assert len(shop.scrub()) == 3
    shop.finish_all()


def test_a_few_bytes_at_a_time_miss_nothing() -> None:
    shop = stored(path=(0, 1, 0, 1, 1))
    seen = []
    while found := shop.cache.next_scrubs(2 * UNIT):
        assert len(found) <= 2
        seen += [(each.tier, each.hash) for each in found]
        for each in found:
            shop.pending[each.transfer] = each
        shop.finish_all()
    assert sorted(seen) == sorted((tier, key) for tier in (Tier.NVME, Tier.DRAM) for key in chain((0, 1, 0, 1, 1)))


def test_blocks_without_a_checksum_are_passed_over() -> None:
    shop = Shop("transfer")
    shop.put()
    assert (shop.scrub(), shop.scrub()) == ([], [])
    assert shop.cache.stats().scrub_passes == 0


@pytest.mark.parametrize("tier", [Tier.NVME, Tier.DRAM])
def test_wrong_bytes_are_found_though_nobody_reads_them(tier: Tier) -> None:
    shop = stored("read")
    shop.rot(0, tier)
    while shop.scrub():
        shop.finish_all()
    (found,) = [each for each in shop.seen if isinstance(each, Corrupted)]
    assert (found.tier, found.found_by) == (tier, FoundBy.SCRUB)
    assert "quarantined" in shop.states(tier)
    assert "quarantined" not in shop.states(Tier.NVME if tier is Tier.DRAM else Tier.DRAM)
    assert shop.counter("corrupt_found_by_scrub") == 1


def test_a_quarantined_disk_slot_is_recorded_as_one() -> None:
    shop = stored()
    shop.rot(0, Tier.NVME)
    shop.scrub()
    shop.finish_all()
    assert [each.quarantine for each in shop.pending.values()] == [True]  # type: ignore[union-attr]
    shop.finish_all()
    assert shop.states(Tier.NVME) == {"live", "quarantined"}


def test_what_was_found_of_a_slot_that_changed_hands_is_nothing() -> None:
    shop = stored(path=(0,))
    (look,) = shop.scrub()
    del shop.pending[look.transfer]
    shop.cache.clear(1, (1,))
    shop.finish_all()
    shop.put((0,))
    shop.write_all()
    assert shop.cache.state.nvme is not None
    assert shop.cache.state.nvme.row_at[shop.cache.state.nvme.locate(look.units)], "the same key is in the same slot again"
    shop.cache.transfer_done(TransferDone(look.transfer, TransferResult.CORRUPT), shop.now)
    shop.step()
    assert (shop.counter("corrupt_blocks"), shop.states(Tier.NVME)) == (0, {"live"})


def test_a_slot_under_the_background_check_is_not_in_the_way() -> None:
    shop = stored()
    while any(each.tier is not Tier.DRAM for each in shop.scrub()):
        shop.finish_all()
    assert shop.cache.state.dram.held_bytes == 0
    shop.put((5, 5, 5, 5, 5, 5, 5, 5), lease=2)
    shop.put((6, 6, 6, 6, 6, 6, 6, 6), lease=3)
    assert len(shop.client.leases[2][0]) + len(shop.client.leases[3][0]) == 16
    shop.finish_all()
    assert shop.counter("corrupt_blocks") == 0


def test_the_bytes_of_this_world_have_checksums_of_their_own() -> None:
    assert len({summed(content) for content in range(100)}) == 100
