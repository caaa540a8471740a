"""Prompts that go on after their whole blocks, and what must be true of the donor that a cache names for one."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvstore.cache.core import Cache
from kvstore.cache.messages import Acquire, Acquired
from tests.simulation.keys import BLOCK_TOKENS, Path, chain, path_of, some_path, tokens_of


@dataclass(frozen=True)
class Going:
    """A prompt: the path of its whole blocks, and all of its tokens."""

    path: Path
    tokens: list[int]

    @classmethod
    def some(cls, chance: Random) -> Going:
        """Whole blocks of some path, or none, and the beginning of one more."""
        path = some_path(chance)
        path = path[: chance.randrange(len(path) + 1)]
        after = tokens_of(some_path(chance)[:1])[: chance.randrange(1, BLOCK_TOKENS + 1)]
        return cls(path, [*tokens_of(path), *after])

    @property
    def hashes(self) -> bytes:
        return b"".join(chain(self.path))

    def is_donor(self, key: bytes, whole: int, tokens: int) -> bool:
        """Whether this block comes after the first `whole` ones and begins with the prompt's next `tokens`, its last one left out."""
        first = whole * BLOCK_TOKENS
        path = path_of(key)
        shared = tokens_of(path[-1:])[:tokens] == self.tokens[first:-1][:tokens]
        return path[:-1] == path_of_blocks(self.tokens, whole) and shared and first + tokens < len(self.tokens)


def path_of_blocks(tokens: list[int], whole: int) -> Path:
    """The path of the first blocks of a prompt: a block's last token tells its word."""
    return tuple(tokens[(block + 1) * BLOCK_TOKENS - 1] for block in range(whole))


def donor_of(cache: Cache, request: Acquire, answer: Acquired) -> bytes:
    """The hash of the donor that a lease has, or waits for."""
    state, position = cache.state, answer.expected - 1
    lease = state.sessions[request.session].leases[request.lease]
    if slot := lease.slots[0][position]:
        return state.index.hash_bytes(state.dram.row_at[slot])
    transfers = (transfer for transfer in state.transfers.values() if (lease, 0, position) in transfer.waiters)
    return state.index.hash_bytes(next(transfers).row)
