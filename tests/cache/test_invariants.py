"""Each rule is live: a state broken on purpose is reported under the rule's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.cache.core import Cache
from kvstore.cache.index import HAS_CHECKSUM
from kvstore.cache.invariants import RULES, violations
from kvstore.cache.messages import UNIT_BYTES, NamespaceSpec, Release, Tier, TransferResult
from kvstore.cache.slots import SlotState
from kvstore.cache.state import State
from tests.cache.world import World, sizes


def busy_state() -> State:
    """Two blocks in dram (one of them leased) and on nvme, one reservation, one evictable leaf."""
    world = World(Cache(sizes()))
    world.attach(0, 0, 0)
    client = world.clients[1]
    world.reserve(client, 1, [], 2)
    world.commit(client, list(client.reserved), (0, 1), lease=1)
    world.reserve(client, 1, [], 1)
    world.commit(client, list(client.reserved), (1,), lease=2)
    world.release(client, 2, 0, world.cache.release(Release(1, 2)))
    world.reserve(client, 2, [], 1)
    for write in world.cache.next_writes(9):
        world.pending[write.transfer] = write
        world.finish(write.transfer, TransferResult.OK)
    world.step()
    state = world.cache.state
    state.candidates(Tier.DRAM, 1).pop()  # fills the list of candidates
    state.candidates(Tier.DRAM, 1).refill()
    assert violations(state) == []
    return state


def _stored_row(state: State) -> int:
    return int(state.dram.row[next(s for s in range(1, 40) if state.dram.state_at[s] == SlotState.LIVE)])


def _live_slot(state: State) -> int:
    return state.index.slot_at[Tier.DRAM][_stored_row(state)]


def _leased(state: State) -> int:
    return state.sessions[1].leases[1].slots[0][0]


def visible_before_stored(state: State) -> None:
    state.dram.state_at[_live_slot(state)] = SlotState.FILLING


def checksum_lost(state: State) -> None:
    state.index.flags_at[_stored_row(state)] &= ~HAS_CHECKSUM


def lease_not_counted(state: State) -> None:
    state.dram.holds_at[_leased(state)] = 0


def slot_changed_hands(state: State) -> None:
    state.dram.generation_at[_leased(state)] += 1


def bytes_lost(state: State) -> None:
    state.dram.bytes_in[SlotState.FREE] -= UNIT_BYTES


def child_not_counted(state: State) -> None:
    state.index.children_at[Tier.DRAM][state.index.parent_at[_stored_row(state)]] += 1


def limit_exceeded(state: State) -> None:
    state.sessions[1].limit_bytes = 1


def stranger_admitted(state: State) -> None:
    state.namespaces[1] = NamespaceSpec("another", bytes(32), 1, UNIT_BYTES)


def candidate_forgotten(state: State) -> None:
    for line in state.candidates(Tier.DRAM, 1)._lines:
        line.heap.clear()


def block_count_wrong(state: State) -> None:
    state.dram.blocks += 1


def token_changed(state: State) -> None:
    assert state.index.tokens is not None
    state.index.tokens.ids[state.index.tokens.first_at[_stored_row(state)], 0] += 1


BREAKS: dict[str, Callable[[State], None]] = {
    "visible-after-stored": visible_before_stored,
    "never-wrong": checksum_lost,
    "leased-stays": lease_not_counted,
    "promise-kept": slot_changed_hands,
    "conserved": bytes_lost,
    "leaves-first": child_not_counted,
    "bounded": limit_exceeded,
    "isolated": stranger_admitted,
    "progress": candidate_forgotten,
    "honest": block_count_wrong,
    "tokens-true": token_changed,
}


def test_every_rule_has_a_way_to_break_it() -> None:
    assert set(BREAKS) == {rule.__name__.replace("_", "-") for rule in RULES}


@pytest.mark.parametrize("rule", BREAKS)
def test_a_broken_rule_is_reported_by_its_name(rule: str) -> None:
    state = busy_state()
    BREAKS[rule](state)
    assert rule in {line.split(":")[0] for line in violations(state)}


@pytest.mark.parametrize("lose", ["one chunk of two blocks", "one chunk of none", "a block that is not stored", "a count"])
def test_misplaced_token_ids_are_reported(lose: str) -> None:
    state = busy_state()
    table, row = state.index.tokens, _stored_row(state)
    assert table is not None
    match lose:
        case "one chunk of two blocks":
            table.after_at[table.first_at[row]] = table.first_at[row + 1] or table.first_at[row - 1]
        case "one chunk of none":
            table.after_at[table.first_at[row]] = 0
        case "a block that is not stored":
            table.first_at[state.index.parent_at[row]] = table.first_at[row]
        case _:
            table.blocks += 1
    assert "tokens-true" in {line.split(":")[0] for line in violations(state)}
