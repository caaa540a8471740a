"""Lookup: how far a prefix reaches. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.index import Rows
from kvstore.cache.messages import Hashes, Keep, KeepKind, Looked, Refused, Tier, unpack_hashes
from kvstore.cache.state import State

NOT_NEEDED = 255  # a tier code: this member keeps only a window, and the block lies before it


def complete_prefix(present: list[NDArray[np.bool_]], keeps: list[Keep]) -> int:
    """The longest prefix for which every member has what it keeps. `present[m]` [n] says which blocks member m has."""
    longest = len(present[0])
    fits = np.ones(longest + 1, bool)
    lengths = np.arange(longest + 1)
    for has, keep in zip(present, keeps, strict=True):
        if keep.kind is KeepKind.ALL:
            fits &= lengths <= (longest if has.all() else int(np.argmin(has)))
        else:
            last_gap = np.maximum.accumulate(np.concatenate([[-1], np.where(has, -1, np.arange(longest))]))
            run = lengths - 1 - last_gap  # blocks without a gap just before each length
            need = 1 if keep.kind is KeepKind.STATE else keep.window_blocks
            fits &= run >= np.minimum(need, lengths)
    return int(np.flatnonzero(fits)[-1])


def members_of(state: State, tenant: str, namespace: int, group: str) -> tuple[int, ...] | Refused:
    """The namespaces that an operation on a namespace or a group is about."""
    if group:
        found = state.groups.get((tenant, group))
        return found.namespaces if found else Refused("NOT_FOUND", f"group {group!r} is not known; JoinGroup makes it")
    if not 0 < namespace < len(state.namespaces) or state.spec(namespace).tenant != tenant:
        return Refused("NOT_FOUND", f"namespace {namespace} is not open; call OpenNamespace first")
    return (namespace,)


def present_in(state: State, rows: Rows) -> NDArray[np.bool_]:
    """Which rows have bytes in any tier. [n]"""
    found: NDArray[np.bool_] = np.zeros(len(rows), bool)
    for tier in state.index.tiers:
        found |= state.index.slot[tier][rows] > 0
    return found & (rows > 0)


def _in_pools(pools: Sequence[State], namespace: int, hashes: Hashes) -> NDArray[np.bool_]:
    """Which blocks are in some pool. [n]"""
    found: NDArray[np.bool_] = np.logical_or.reduce([present_in(pool, pool.index.find(namespace, hashes)) for pool in pools])
    return found


def lookup(state: State, tenant: str, namespace: int, group: str, hashes: Hashes, pools: Sequence[State]) -> Looked | Refused:
    """How far the prefix reaches and in which tier each block is. Changes nothing.

    `pools`: the states of GPUs' pools, where namespaces have the same ids; what is there counts as in hbm.
    """
    members = members_of(state, tenant, namespace, group)
    if isinstance(members, Refused):
        return members
    rows = [state.index.find(member, hashes) for member in members]
    keeps = [state.keep(member) for member in members]
    whole = all(keep.kind is KeepKind.ALL for keep in keeps)
    fastest = min(state.index.tiers)
    if not pools and whole and all(state.index.slot[fastest][mine].all() for mine in rows):  # the common case: all of it is in memory
        return Looked(len(hashes), (np.full(len(hashes), fastest, np.uint8),) * len(members))
    present = [present_in(state, mine) for mine in rows]
    in_hbm = [_in_pools(pools, member, hashes) for member in members] if pools else []
    for here, there in zip(present, in_hbm, strict=False):
        here |= there
    blocks = complete_prefix(present, keeps)
    codes = []
    for which, (mine, keep) in enumerate(zip(rows, keeps, strict=True)):
        code = np.full(blocks, NOT_NEEDED, np.uint8)
        for tier in sorted(state.index.tiers, reverse=True):
            code[state.index.slot[tier][mine[:blocks]] > 0] = tier
        if in_hbm:
            code[in_hbm[which][:blocks]] = Tier.HBM
        code[: keep.first_needed(blocks)] = NOT_NEEDED
        codes.append(code)
    return Looked(blocks, tuple(codes))


def leading(state: State, tenant: str, namespace: int, hashes: bytes) -> bytes | Refused:
    """`lookup` in one namespace, of packed hashes, the shortest way: the tier of each leading block that is here."""
    members = members_of(state, tenant, namespace, "")
    if isinstance(members, Refused):
        return members
    native = state.index.native
    if native is not None and state.keep(namespace).kind is KeepKind.ALL:
        return native.leading(namespace, hashes)
    found = lookup(state, tenant, namespace, "", unpack_hashes(hashes), ())
    return found if isinstance(found, Refused) else found.tiers[0][: found.blocks].tobytes()
