"""Partial tails: beyond the whole blocks of a prompt, the first tokens of a stored block that begins as the prompt goes on.

An option of a namespace. Its commits carry token ids, which are kept only where they hash to the block's name (rule: never-wrong), so that
no client can make another one read a block for tokens that it is not of. A prompt's `Acquire` brings them too: they find the block to read
from, its *donor*, and give their ids back to blocks that lost them, which those read from a disk at start have.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.finding import present_in
from kvstore.cache.index import Rows
from kvstore.cache.messages import Acquire, BlockOutcome, Commit, Hashes, Prompt, Refused, Tier, Tokens, pack_hashes, unpack_hashes
from kvstore.cache.state import State
from kvstore.hashing import misnamed_blocks

MAX_CHILDREN = 128  # blocks after one block that are looked at, newest first: some 20 µs of the event loop
MAX_LEARNED = 256  # blocks whose ids one acquire may bring: 0.2 ms of hashing


def refuse_tokens(state: State, request: Commit) -> Refused | None:
    """Why a commit with token ids does nothing; None where its ids are right, or it has none."""
    if request.tokens is None:
        return None
    spec = state.spec(request.namespace)
    if not spec.tails:
        return Refused("INVALID_ARGUMENT", f"namespace {request.namespace} keeps no token ids; open it with tails, or send none")
    if len(request.tokens) != len(request.hashes) * spec.block_tokens:
        text = f"{len(request.tokens)} token ids for {len(request.hashes)} blocks of {spec.block_tokens}; give all of each block, or none"
        return Refused("INVALID_ARGUMENT", text)
    wrong = misnamed_blocks(pack_hashes(request.hashes), _packed_parents(request), request.tokens.tobytes(), spec.block_tokens)
    if not wrong:
        return None
    state.counters["wrong_tokens"] += 1
    text = f"token_ids: those of block {wrong[0]} do not hash to its name; send the block's own, and none for one with extra keys"
    return Refused("INVALID_ARGUMENT", text)


def _packed_parents(request: Commit) -> bytes:
    """One parent a block."""
    parents = pack_hashes(request.parents)
    return parents if len(request.parents) == len(request.hashes) else parents + pack_hashes(request.hashes[:-1])


def keep_fresh_tokens(state: State, request: Commit) -> None:
    """After the commit of one chain of new blocks: keep their ids, which are right."""
    if request.tokens is not None:
        rows = state.index.find(request.namespace, request.hashes)
        _put(state, rows, request.tokens.reshape(len(rows), -1))


def keep_tokens(state: State, request: Commit, outcomes: NDArray[np.uint8]) -> None:
    """After a commit: keep the ids, which are right, of blocks that are stored and had none."""
    if request.tokens is None:
        return
    done = np.flatnonzero((outcomes == BlockOutcome.STORED) | (outcomes == BlockOutcome.EXISTS))
    rows = state.index.find(request.namespace, request.hashes[done])
    lacking = _lacking(state, rows, unpack_hashes(_packed_parents(request))[done])
    _put(state, rows[lacking], request.tokens.reshape(len(request.hashes), -1)[done[lacking]])


def keep_one(state: State, request: Commit, outcome: BlockOutcome) -> None:
    """`keep_tokens` for one block, as of a sequence that grows."""
    if request.tokens is None or outcome not in (BlockOutcome.STORED, BlockOutcome.EXISTS):
        return
    index, table = state.index, state.index.tokens
    row = index.find_one(request.namespace, request.hashes.tobytes())
    if table is None or table.first_at[row] or index.hash_bytes(index.parent_at[row]) != request.parents.tobytes():
        return
    if table.room(len(request.tokens)):
        table.put_one(row, request.tokens)
    else:
        state.counters["tokens_not_kept"] += 1


def _lacking(state: State, rows: Rows, parents: Hashes) -> NDArray[np.intp]:
    """Where a block is stored under just this parent, and its ids are not kept."""
    index, table = state.index, state.index.tokens
    if table is None:
        return np.zeros(0, np.intp)
    lacks = present_in(state, rows) & (table.first[rows] == 0)
    lacks &= (index.hash[index.parent[rows]] == parents).all(axis=1)
    at = np.flatnonzero(lacks)
    return at[np.sort(np.unique(rows[at], return_index=True)[1])]


def _put(state: State, rows: Rows, tokens: Tokens) -> None:
    table = state.index.tokens
    if table is None or not len(rows):
        return
    room = table.room(tokens.shape[1])
    if len(rows) > room:
        state.counters["tokens_not_kept"] += len(rows) - room
        rows, tokens = rows[:room], tokens[:room]
    table.put(rows, tokens)


# ---- acquire


def refuse_prompt(state: State, request: Acquire) -> Refused | None:
    """Why an acquire may not bring a prompt; None where it may, or has none."""
    if request.prompt is None:
        return None
    if request.group:
        return Refused("INVALID_ARGUMENT", "a group has no tails; acquire one namespace, or send no token ids")
    if not state.spec(request.namespace).tails:
        return Refused("INVALID_ARGUMENT", f"namespace {request.namespace} keeps no token ids; open it with tails, or send none")
    return None


def with_donor(state: State, request: Acquire, prompt: Prompt) -> tuple[Hashes, int]:
    """The prompt's leading blocks that are here and then the donor's hash; and how many of the donor's tokens are the prompt's.

    The request's own hashes, and 0, where no stored block begins as the prompt goes on. The prompt's last token is never among them.
    """
    rows = state.index.find(request.namespace, request.hashes)
    here = present_in(state, rows)
    blocks = len(rows) if here.all() else int(np.argmin(here))
    size = state.spec(request.namespace).block_tokens
    _learn(state, request, prompt, rows[:blocks])
    above = int(rows[blocks - 1]) if blocks else state.index.find_one(request.namespace, prompt.root)
    asked = prompt.tokens[: max(0, len(prompt.tokens) - 1)][blocks * size : (blocks + 1) * size]
    donor, usable = _best_child(state, above, asked) if above and len(asked) else (0, 0)
    if not usable:
        return request.hashes, 0
    return np.concatenate([request.hashes[:blocks], state.index.hash[donor : donor + 1]]), usable


def _learn(state: State, request: Acquire, prompt: Prompt, rows: Rows) -> None:
    """Keep the prompt's ids for those of its blocks that are stored without any."""
    table, size = state.index.tokens, state.spec(request.namespace).block_tokens
    known = min(len(rows), len(prompt.tokens) // size)
    rows = rows[:known]
    if table is None or not known or (table.first[rows] > 0).all() or not table.room(size):
        return
    hashes, tokens = request.hashes[:known], prompt.tokens[: known * size].reshape(known, size)
    parents = np.concatenate([np.frombuffer(prompt.root, "<u8").reshape(1, 4), hashes[:-1]])
    lacking = _lacking(state, rows, parents)[:MAX_LEARNED]
    wrong = misnamed_blocks(pack_hashes(hashes[lacking]), pack_hashes(parents[lacking]), tokens[lacking].tobytes(), size)
    lacking = np.delete(lacking, wrong)
    _put(state, rows[lacking], tokens[lacking])


def _best_child(state: State, above: int, asked: Tokens) -> tuple[int, int]:
    """Of the newest blocks after `above` the one that begins with the most of `asked`, and how many; one in dram rather than not."""
    index, table = state.index, state.index.tokens
    if table is None:
        return 0, 0
    rows, child, first_at, next_at = [], index.first_child_at[above], table.first_at, index.next_at
    for _ in range(MAX_CHILDREN):
        if not child:
            break
        if first_at[child]:
            rows.append(child)
        child = next_at[child]
    if not rows:
        return 0, 0
    found = np.array(rows, np.int32)
    same = table.common(found, asked)
    best = int(np.argmax(2 * same + (index.slot[Tier.DRAM][found] > 0)))
    return rows[best], int(same[best])
