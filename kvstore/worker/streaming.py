"""Unbounded streams in bounded memory (StreamingLLM: Xiao et al. 2023): the first tokens and a window of the last ones are kept.

A token attends to the first `sinks` tokens and to the last `window`, itself included, as if these were all there are: its position is
its place among them. Since positions change as tokens are dropped, keys are kept before their rotation. So the blocks of a stream hold
something else than those of other sequences: they are private, and never committed. Which tokens share a step changes nothing.

    stream = StreamSequence(cache, Rotation(model), prompt, StreamShape(sinks=4, window=1000))
    (ensure → span → advance)* → close
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.clients.blocks import Arrival
from kvstore.errors import EnvironmentFault, InternalFault, InvalidArgument
from kvstore.worker.paged import PagedCache
from kvstore.worker.pool import Place, slots_of
from kvstore.worker.rotation import Angles, Rotation
from kvstore.worker.rows import BlockTable
from kvstore.worker.spans import Span


@dataclass(frozen=True)
class StreamShape:
    """What a stream keeps: its first `sinks` tokens, and what its next `step_tokens` need of the last `window`.

    sinks        tokens, 1 or more: without the first ones a model's attention has nowhere to go, and its text falls apart
    step_tokens  the most new tokens of it in one step
    """

    sinks: int = 4
    window: int = 1024
    step_tokens: int = 128

    def __post_init__(self) -> None:
        if min(self.sinks, self.window, self.step_tokens) < 1:
            raise InvalidArgument(f"{self}: give at least 1 of each")

    def blocks(self, block_tokens: int, total_tokens: int | None = None) -> int:
        """The most blocks that a stream ever needs, or one that ends with so many tokens."""
        most = -(-self.sinks // block_tokens) + (self.window + self.step_tokens - 2) // block_tokens + 2
        return most if total_tokens is None else min(most, -(-total_tokens // block_tokens))


class StreamSequence:
    """One stream; see `sequences.AnySequence`. It takes all its blocks with its first step and uses them again and again.

    dropped        whole blocks, between sinks and window, that are gone      total_tokens   that it will have at most; None: no end
    Raises InvalidArgument without a token.
    """

    unrotated = True

    def __init__(
        self, cache: PagedCache, rotation: Rotation, tokens: Sequence[int], shape: StreamShape, total_tokens: int | None = None
    ) -> None:
        if not tokens:
            raise InvalidArgument("the prompt has no tokens; give at least one")
        self.shape, self.table = shape, BlockTable(cache.layout)
        self.tokens = list(tokens)
        self.computed = self.dropped = self.hit_tokens = self.stored_tokens = 0
        self.hash_s = self.acquire_s = self.reserve_s = 0.0
        self.fault: EnvironmentFault | None = None
        self.arrival: Arrival | None = None
        self._cache, self._rotation = cache, rotation
        self._size = cache.layout.tokens
        self._sink_blocks = -(-shape.sinks // self._size)
        self._blocks = shape.blocks(self._size, total_tokens)
        self._places: list[Place] = []
        self._free: deque[Place] = deque()
        self._used: deque[Place] = deque()
        cache.opened(self)

    @property
    def waiting(self) -> int:
        """Tokens to be computed."""
        return len(self.tokens) - self.computed

    @property
    def blocks_missing(self) -> int:
        """Slots that its first step takes."""
        return 0 if self._places else self._blocks

    @property
    def may_stop(self) -> bool:
        """Until the first block is gone its tokens can be computed again as they were."""
        return not self.dropped

    @property
    def step_tokens(self) -> int:
        """What its blocks are enough for."""
        return self.shape.step_tokens

    def hashes_to_come(self) -> set[bytes]:
        """None: nobody else can use its blocks."""
        return set()

    def addresses(self) -> list[tuple[int, int]]:
        """All that it took, in use or not."""
        return [(place.arena.address, place.unit) for place in self._places]

    def append(self, token: int) -> None:
        """Add a token, to be computed by a later step."""
        self.tokens.append(token)

    def fork(self) -> "StreamSequence":
        """There is no such thing: its blocks are not shared."""
        raise InternalFault("a stream was to be forked; report this")

    def ensure(self, count: int) -> None:
        """See `AnySequence`. Raises InvalidArgument for more tokens than a step of this stream may have, or than wait."""
        if not 1 <= count <= min(self.shape.step_tokens, self.waiting):
            raise InvalidArgument(f"{count} tokens of a stream in one step: {self.waiting} wait, the most is {self.shape.step_tokens}")
        if not self._places:
            self._places = self._cache.places(self._blocks, self.fault)
            self._free.extend(self._places)
            for place in self._places:
                self._cache.added(place)
        while len(self.table) + self.dropped < -(-(self.computed + count) // self._size):
            place = self._free.popleft()
            self._used.append(place)
            self.table.append(place.arena, [place.unit])

    def span(self, count: int, at: int) -> Span:
        """Its part in a step, whose token number `at` is its first."""
        gone = self.dropped * self._size
        return Span(self.table, self.computed - gone, count, at, own=StreamView(self.shape, self._rotation, self.computed, count, gone))

    def advance(self, count: int) -> None:
        """A step has filled the next `count` tokens' slots: drops the blocks that no later token attends to."""
        self.computed += count
        unseen = max(0, self.computed - self.shape.window + 1) // self._size - self._sink_blocks - self.dropped
        if unseen > 0:
            self.table.drop(self._sink_blocks, unseen)
            self.dropped += unseen
            for _ in range(unseen):
                place = self._used[self._sink_blocks]
                del self._used[self._sink_blocks]
                self._free.append(place)

    def close(self) -> None:
        """Give its blocks back. Idempotent."""
        self._cache.forget(self)
        places, self._places = self._places, []
        if held := [place for place in places if place.shared]:
            self._cache.store.abandon(slots_of(held))
        self._cache.pool.put_back([place for place in places if not place.shared])


class StreamView:
    """How the new tokens of a stream attend in one step: `first` is the number of the first in the whole stream.

    missing   so many tokens between sinks and window are not in the table any more
    """

    def __init__(self, shape: StreamShape, rotation: Rotation, first: int, count: int, missing: int) -> None:
        sinks, window = shape.sinks, shape.window
        self._rotation, self._count = rotation, count
        numbers = torch.arange(first, first + count)
        low = max(sinks, first - window + 1)  # the first token after the sinks that any of them sees
        early = torch.arange(min(sinks, first + count))
        late = torch.arange(low, max(low, first + count))
        # Distances inside the window are as they were; those to the sinks are as if nothing lay between sinks and window.
        self._parts = [
            (early, early, numbers.clamp(max=sinks + window - 1)),
            (late - missing, late - low + sinks, numbers - low + sinks),
        ]
        seen = torch.cat((early <= numbers[:, None], (late <= numbers[:, None]) & (late > numbers[:, None] - window)), dim=1)
        self._unseen = ~seen
        self._kept = torch.cat((early, late - missing))
        self._angles: list[tuple[Angles, Angles]] = []  # of each part's keys and queries: the same in every layer

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention of one layer: query [1, q_heads, new token, dim], keys and values [kv_heads, token of the table, dim], unrotated.

        Returns [1, new token, q_heads, dim].
        """
        if not self._angles:
            angles = self._rotation.angles
            self._angles = [(angles(keys, places), angles(query[0], own)) for _, places, own in self._parts]
        scores = torch.cat(
            [self._scores(query[0], keys[:, at], *angles) for (at, _, _), angles in zip(self._parts, self._angles, strict=True)], dim=-1
        )
        scores = (scores * scaling).masked_fill(self._unseen, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        kept = values[:, self._kept]
        out = weights.view(kept.shape[0], -1, kept.shape[1]) @ kept
        return out.view(1, query.shape[1], self._count, -1).transpose(1, 2).contiguous()

    def _scores(self, query: Tensor, keys: Tensor, key_angles: Angles, query_angles: Angles) -> Tensor:
        """[q_head, new token, key] with keys [kv_head, key, dim], each turned by its angles."""
        query, keys = self._rotation.turn(query, query_angles), self._rotation.turn(keys, key_angles)
        grouped = query.reshape(keys.shape[0], -1, query.shape[-1])
        return (grouped @ keys.transpose(1, 2)).view(query.shape[0], self._count, -1)
