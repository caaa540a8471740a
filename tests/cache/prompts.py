"""Acquires with a prompt in a world: the tail that is answered is compared with what one would find by looking at every block."""

from __future__ import annotations

import numpy as np

from kvstore.cache.messages import Acquire, Acquired, EndReason, Prompt, Refused
from tests.cache.world import BLOCK_TOKENS, ROOT, TAILS, Client, Path, World, chain, key_of, pack, tokens_of


def acquire_on(world: World, client: Client, lease: int, path: Path, after: list[int]) -> None:
    """Acquire with a prompt: a path's tokens and some more. Its last token is always computed."""
    before = world.cache.lookup("default", TAILS, "", pack(chain(path))).blocks  # type: ignore[union-attr]
    tokens = [*tokens_of(path), *after]
    prompt = Prompt(ROOT, np.array(tokens, np.uint32))
    answer = world.cache.acquire(Acquire(client.session, lease, pack(chain(path)), world.now + 1, TAILS, prompt=prompt), world.now)
    world.paths.update((key_of(path[:i]), path[:i]) for i in range(1, before + 1))  # it brought their tokens
    world.acquired(client, lease, (TAILS,), chain(path), answer)
    if isinstance(answer, Refused):
        return
    assert isinstance(answer, Acquired)
    most, donors = _naive_tail(world, path[:before], tokens[before * BLOCK_TOKENS : -1])
    if answer.tail_tokens:
        assert (answer.tail_tokens, answer.expected) == (most, before + 1)
        client.asked[lease] = ((TAILS,), chain(path)[:before])
        client.donors[lease] = donors
    elif answer.expected == before and most:
        assert answer.reason in (EndReason.NO_ROOM, EndReason.LIMIT), "a tail is found where there is one"


def _naive_tail(world: World, above: Path, tokens: list[int]) -> tuple[int, list[bytes]]:
    """The most tokens that a stored block after `above` shares with these, and the blocks that do."""
    index, best = world.cache.state.index, 0
    donors: list[bytes] = []
    assert index.tokens is not None
    for key, path in world.paths.items():
        row = index.find_one(TAILS, key)
        if path[:-1] != above or not index.tokens.first_at[row]:
            continue
        shared = common(tokens_of(path[-1:]), tokens)
        if shared >= max(best, 1):
            donors = [key] if shared > best else [*donors, key]
            best = shared
    return best, donors


def common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    return shared
