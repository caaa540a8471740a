"""Why a chain of blocks is found no further than it is, and what there is of each namespace: for people who wonder. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.index import IN_FLIGHT
from kvstore.cache.messages import Hashes, Tier
from kvstore.cache.state import State
from kvstore.cache.story import NO_BLOCK

CENSUS_ROWS = 65_536  # rows that a piece of a census goes over: under a millisecond


class Reason(StrEnum):
    """Why a block is not here."""

    BEING_WRITTEN = "being_written"
    EVICTED = "evicted"
    REMOVED = "removed"  # it was cleared, or its bytes were wrong
    NOT_STORED = "not_stored"  # or it left so long ago that nothing tells of it any more


def why_missing(state: State, namespace: int, hashes: Hashes, first: int) -> Reason:
    """Why block `first` of a chain is not here. That a chain was evicted is told of some of its blocks, so those after it are asked too."""
    row = int(state.index.find(namespace, hashes[first : first + 1])[0])
    if row and state.index.flags_at[row] & IN_FLIGHT:
        return Reason.BEING_WRITTEN
    word = hashes[first : first + 1, 0]
    told = state.story.last(namespace, word)
    if told == "commit":  # it left with many others, of which not each is told: all of them were cleared, or evicted
        cleared = state.story.last(namespace, np.append(word, np.uint64(NO_BLOCK))) == "clear"
        told = "clear" if cleared else "evict"
    if not told and state.story.last(namespace, hashes[first + 1 :, 0]) == "evict":
        told = "evict"
    return {"evict": Reason.EVICTED, "clear": Reason.REMOVED, "remove": Reason.REMOVED}.get(told, Reason.NOT_STORED)


def census(state: State) -> Iterator[dict[Tier, NDArray[np.int64]]]:
    """Blocks of each namespace, by its id, in each tier; in pieces to be added up. The cache may change between two of them."""
    index, count, start = state.index, len(state.namespaces), 1
    while start:
        rows = index.rows(start, start + CENSUS_ROWS)
        within = {tier: index.namespace[rows[index.slot[tier][rows] > 0]] for tier in index.tiers}
        yield {tier: np.bincount(namespaces, minlength=count)[:count] for tier, namespaces in within.items()}
        start = index.next_rows(start + CENSUS_ROWS)
