"""Prefetch and pin: wishes, without a promise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.index import PINNED
from kvstore.cache.messages import Hashes, Priority, Tier
from kvstore.cache.moving import make_room
from kvstore.cache.reading import start_read
from kvstore.cache.recency import use
from kvstore.cache.slots import SlotState
from kvstore.cache.state import State


def prefetch(state: State, namespace: int, hashes: Hashes, deadline_at: float) -> tuple[int, int]:
    """Start to bring leading blocks up without a lease. Answers (started, in dram already)."""
    started = present = 0
    for row in state.index.find(namespace, hashes).tolist():
        if state.index.slot_at[Tier.DRAM][row] or row in state.reading:
            present += 1
            use(state, row)
        elif row and Tier.NVME in state.tables and state.index.slot_at[Tier.NVME][row]:
            got = make_room(state, Tier.DRAM, state.spec(namespace).slot_units, 1, SlotState.FILLING)
            if not got:
                break
            start_read(state, row, got[0], Priority.PREFETCH, deadline_at)
            started += 1
        else:
            break
    return started, present


def pin(state: State, namespace: int, hashes: Hashes, on: bool) -> NDArray[np.bool_]:
    """Have blocks evicted only after all that are not pinned (or as usual again). Answers which changed. [n]"""
    changed = np.zeros(len(hashes), bool)
    for place, row in enumerate(state.index.find(namespace, hashes).tolist()):
        if row and state.index.stored(row) and bool(state.index.flags_at[row] & PINNED) != on:
            state.index.flags_at[row] ^= PINNED
            changed[place] = True
            for tier in state.index.tiers:
                if slot := state.index.slot_at[tier][row]:
                    state.expose(tier, slot)
    return changed
