"""A block was asked for: it is recent in every tier that has it."""

from __future__ import annotations

from kvstore.cache.index import Rows
from kvstore.cache.state import State


def use(state: State, row: int) -> None:
    """The block in this row."""
    for tier in state.index.tiers:
        if slot := state.index.slot_at[tier][row]:
            state.touch(tier, slot)


def use_many(state: State, rows: Rows) -> None:
    """`use` for many, in the order of their chain."""
    for tier in state.index.tiers:
        slots = state.index.slot[tier][rows]
        state.touch_many(tier, slots[slots > 0])
