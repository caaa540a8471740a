"""Hits in dram that are verified before they are granted, first checksums, and what wrong bytes lead to."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.cache.leaving import evict
from kvstore.cache.messages import Acquire, Commit, Corrupted, EndReason, FoundBy, Reserve, Reserved, Tier
from tests.cache.shop import FAILED, OK, PATH, Shop, stored
from tests.cache.world import ROOT, UNIT, chain, pack, summed


@pytest.fixture
def shop() -> Shop:
    """Three blocks in dram whose checksums are known; nobody holds them."""
    shop = Shop()
    shop.put()
    shop.sum_all()
    shop.let_go(1)
    return shop


# ---- hits


def test_a_hit_is_granted_only_when_it_is_verified(shop: Shop) -> None:
    shop.get(2)
    assert (shop.grants(2), len(shop.verifies())) == ((0, None), 3)
    first, second, third = list(shop.pending)
    shop.finish(second, OK)
    shop.step()
    assert shop.grants(2) == (0, None)
    shop.finish(first, OK)
    shop.step()
    assert shop.grants(2) == (2, None)
    shop.finish(third, OK)
    shop.step()
    assert shop.grants(2) == (3, EndReason.COMPLETE)


def test_without_the_setting_a_hit_is_granted_at_once() -> None:
    shop = Shop("transfer")
    shop.put()
    shop.get(2)
    assert (shop.grants(2), shop.verifies()) == ((3, EndReason.COMPLETE), [])
    assert shop.cache.next_sums(1 << 20) == []


def test_two_who_ask_at_once_share_one_look(shop: Shop) -> None:
    shop.get(2)
    shop.get(3)
    assert len(shop.verifies()) == 3
    shop.finish_all()
    assert shop.grants(2) == shop.grants(3) == (3, EndReason.COMPLETE)


def test_wrong_bytes_end_the_prefix_and_the_block(shop: Shop) -> None:
    shop.get(2)
    shop.spoil(shop.verifies()[1].units)
    shop.finish_all()
    assert shop.grants(2) == (1, EndReason.FAILED)
    assert shop.cache.lookup("default", 1, "", pack(chain(PATH))).blocks == 1  # type: ignore[union-attr]
    (found,) = [each for each in shop.seen if isinstance(each, Corrupted)]
    assert (found.tier, found.found_by, found.hash) == (Tier.DRAM, FoundBy.READ, chain(PATH)[1])
    assert shop.states() == {"live", "quarantined"}
    assert (shop.counter("corrupt_blocks"), shop.counter("corrupt_found_by_read")) == (1, 1)


def test_wrong_bytes_in_dram_take_the_copy_on_disk_too() -> None:
    shop = Shop()
    shop.put()
    shop.sum_all()
    shop.write_all()
    shop.let_go(1)
    assert shop.states(Tier.NVME) == {"live"}
    shop.get(2)
    for verify in shop.verifies():
        shop.spoil(verify.units)
    shop.finish_all()
    shop.finish_all()
    assert shop.grants(2) == (0, EndReason.FAILED)
    assert (shop.states(), shop.states(Tier.NVME)) == ({"quarantined"}, set())


def test_a_wrong_slot_that_others_hold_is_quarantined_when_they_let_go() -> None:
    shop = Shop()
    shop.put()
    shop.sum_all()
    shop.get(2)
    shop.spoil(shop.verifies()[0].units)
    shop.finish_all()
    assert (shop.grants(2), shop.states()) == ((0, EndReason.FAILED), {"live", "doomed"})
    shop.let_go(1)
    assert shop.states() == {"live", "quarantined"}
    shop.put((7, 7, 7, 7), lease=4)
    shop.put((8, 8, 8, 8), lease=5)
    assert "quarantined" in shop.states()


def test_a_look_that_failed_says_nothing_of_the_bytes(shop: Shop) -> None:
    shop.get(2)
    shop.finish_all(FAILED)
    assert (shop.grants(2), shop.counter("failed_verifies")) == ((0, EndReason.FAILED), 3)
    shop.get(3)
    shop.finish_all()
    assert shop.grants(3) == (3, EndReason.COMPLETE)


def test_what_is_cleared_under_a_look_is_not_granted(shop: Shop) -> None:
    shop.get(2)
    shop.cache.clear(1, (1,))
    shop.step()
    assert shop.grants(2) == (0, EndReason.FAILED)
    shop.put((0, 1), lease=3)  # the same keys in other slots
    shop.finish_all()
    assert shop.grants(2) == (0, EndReason.FAILED)
    shop.let_go(3)
    assert shop.states() == {"live"}


def test_a_slot_under_a_look_is_not_taken_for_others(shop: Shop) -> None:
    shop.get(2)
    units = {verify.units for verify in shop.verifies()}
    shop.let_go(2)
    for number in range(10, 23):  # as many as there are other slots
        shop.put((number,), lease=number)
    assert all(shop.dram[unit] in (1, 2, 3) for unit in units)
    shop.finish_all()


def test_what_is_verified_by_the_deadline_is_granted(shop: Shop) -> None:
    shop.get(2)
    first, second, third = list(shop.pending)
    shop.finish(first, OK)
    shop.finish(third, OK)
    shop.pass_time(2.0)
    assert shop.grants(2) == (1, EndReason.DEADLINE)
    shop.finish(second, OK)
    shop.step()
    shop.let_go(2)
    assert shop.states() == {"live"}


def test_a_groups_lease_has_by_the_deadline_what_is_verified_of_all() -> None:
    shop = Shop()
    shop.cache.join_group(1, "model", (1, 3))
    for namespace in (1, 3):
        shop.put(namespace=namespace, lease=namespace)
    shop.sum_all()
    shop.get(5, group="model")
    looks = shop.verifies()
    assert len(looks) == 5  # the second member keeps a window of two
    shop.finish(looks[0].transfer, OK)
    shop.finish(looks[1].transfer, OK)
    shop.pass_time(2.0)
    assert (shop.grants(5), len(shop.verifies())) == ((0, EndReason.DEADLINE), 3)
    shop.finish_all()
    shop.get(6, group="model")
    assert shop.grants(6) == (0, None)
    shop.finish_all()
    assert shop.grants(6) == (3, EndReason.COMPLETE)


def test_a_groups_lease_is_shortened_where_one_member_was_wrong() -> None:
    shop = Shop()
    shop.cache.join_group(1, "model", (1, 3))
    for namespace in (1, 3):
        shop.put(namespace=namespace, lease=namespace)
    shop.sum_all()
    shop.get(5, group="model")
    (wrong,) = [each for each in shop.verifies() if each.namespace == 1 and each.hash == chain(PATH)[2]]
    shop.spoil(wrong.units)
    shop.finish_all()
    shop.finish_all()
    assert shop.grants(5) == (2, EndReason.FAILED)


def test_what_a_session_holds_already_counts_once_against_its_limit() -> None:
    """Two blocks that it holds are verified again, one comes up from disk: three in all, its limit."""
    shop = stored("read")
    shop.attach(0, 3, 0)
    evict(shop.cache.state, Tier.DRAM, shop.slot_of(chain(PATH)[2]))
    for lease, blocks in ((2, 2), (3, 3)):
        path = PATH[:blocks]
        request = Acquire(2, lease, pack(chain(path)), shop.now + 1.0, 1)
        shop.acquired(shop.clients[2], lease, (1,), chain(path), shop.cache.acquire(request, shop.now))
        shop.finish_all()
        assert shop.grants(lease) == (blocks, EndReason.COMPLETE)


# ---- first checksums


def test_a_commits_checksums_are_taken_right_after_it() -> None:
    shop = Shop()
    shop.put()
    found = shop.cache.next_sums(2 * UNIT)
    assert [(each.hash, each.checksum) for each in found] == [(key, None) for key in chain(PATH)[:2]]
    assert len(shop.cache.next_sums(1)) == 1
    assert shop.cache.next_sums(1 << 20) == []


def test_who_asks_before_the_checksum_is_known_waits_for_it() -> None:
    shop = Shop()
    shop.put()
    (first,) = shop.cache.next_sums(1)
    shop.pending[first.transfer] = first
    shop.get(2)
    assert [each.checksum for each in shop.verifies()] == [None, None, None]
    assert shop.cache.next_sums(1 << 20) == []
    shop.finish_all()
    assert shop.grants(2) == (3, EndReason.COMPLETE)
    shop.get(3)
    assert None not in [each.checksum for each in shop.verifies()]
    shop.finish_all()


def test_a_checksum_from_the_way_down_needs_no_second_look() -> None:
    shop = Shop()
    shop.put()
    shop.write_all()
    assert shop.cache.next_sums(1 << 20) == []


def test_a_block_that_changed_between_two_looks_is_wrong() -> None:
    """A write began when no checksum was known, and took its own later than somebody else did."""
    shop = Shop()
    shop.put((0,))
    shop.let_go(1)
    (write,) = shop.cache.next_writes(1)
    shop.pending[write.transfer] = write
    assert write.checksum is None
    (look,) = shop.cache.next_sums(1)
    shop.pending[look.transfer] = look
    shop.finish(look.transfer, OK)
    shop.spoil(look.units)
    shop.finish(write.transfer, OK)
    shop.step()
    shop.finish_all()
    assert shop.counter("corrupt_found_by_demotion") == 1
    assert (shop.states(), shop.states(Tier.NVME)) == ({"quarantined"}, set())


def test_an_existing_blocks_slot_is_not_shared_unverified(shop: Shop) -> None:
    shop.spoil(shop.cache.state.dram.units_at[shop.slot_of(chain(PATH)[0])])
    shop.put(lease=4)
    assert shop.client.leases[4] == [[None, None, None]]


# ---- checksums that clients give


def commit_with(shop: Shop, checksum: tuple[int, int]) -> None:
    """One block with a checksum of the client's, which it lets go at once."""
    reserved = shop.cache.reserve(Reserve(1, 9, 1, 1))
    assert isinstance(reserved, Reserved)
    shop.dram[int(reserved.units[0])] = "given"
    sums = np.array([checksum], np.uint64)
    shop.cache.commit(Commit(1, 9, 1, reserved.units, reserved.generations, pack(chain((0,))), pack([ROOT]), sums))
    shop.truth[1, chain((0,))[0]] = "given"
    shop.let_go(9)


def test_a_client_that_gives_a_wrong_checksum_costs_no_memory() -> None:
    shop = Shop()
    commit_with(shop, (7, 7))
    shop.get(2, (0,))
    shop.finish_all()
    (found,) = [each for each in shop.seen if isinstance(each, Corrupted)]
    assert (shop.grants(2), shop.states(), found.quarantine) == ((0, EndReason.FAILED), set(), False)


def test_a_given_checksum_that_agreed_once_is_as_good_as_any() -> None:
    shop = Shop()
    commit_with(shop, summed("given"))
    shop.get(2, (0,))
    shop.finish_all()
    assert shop.grants(2) == (1, EndReason.COMPLETE)
    shop.get(3, (0,))
    shop.spoil(shop.verifies()[0].units)
    shop.finish_all()
    shop.let_go(2)
    assert (shop.grants(3), shop.states()) == ((0, EndReason.FAILED), {"quarantined"})
