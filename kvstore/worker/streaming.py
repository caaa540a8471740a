"""Unbounded streams in bounded memory (StreamingLLM: Xiao et al. 2023): the first tokens and a window of the last ones are kept.

A token attends to the first `sinks` tokens and to the last `window`, itself included, as if these were all there are: its position is
its place among them. Since positions change as tokens are dropped, keys are kept before their rotation. So the blocks of a stream hold
something else than those of other sequences: they are private, and never committed. Which tokens share a step changes nothing.

    stream = StreamSequence(cache, Rotation(model), prompt, StreamShape(sinks=4, window=1000))
    (ensure → span, positions → advance)* → close
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.errors import InvalidArgument
from kvstore.worker.attention import Span
from kvstore.worker.paged import PagedCache
from kvstore.worker.pool import Place, slots_of
from kvstore.worker.rotation import Rotation
from kvstore.worker.rows import BlockTable


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

    def blocks(self, block_tokens: int) -> int:
        """The most blocks that a stream ever needs."""
        return -(-self.sinks // block_tokens) + (self.window + self.step_tokens - 2) // block_tokens + 2


class StreamSequence:
    """One stream. It takes its blocks when it begins and uses them again and again; `close` gives them back, before the cache's.

    computed    tokens whose K and V were written      dropped   whole blocks of them, between sinks and window, that are gone
    Raises InvalidArgument without a token, and ResourceExhausted where the store has too few slots.
    """

    def __init__(self, cache: PagedCache, rotation: Rotation, tokens: Sequence[int], shape: StreamShape) -> None:
        if not tokens:
            raise InvalidArgument("the prompt has no tokens; give at least one")
        self.shape, self.table = shape, BlockTable(cache.layout)
        self.computed = self.dropped = 0
        self._cache, self._rotation = cache, rotation
        self._size = cache.layout.tokens
        self._sink_blocks = -(-shape.sinks // self._size)
        self._waiting = deque(tokens)
        self._places = cache.pool.take(shape.blocks(self._size))
        self._free = deque(self._places)
        self._used: deque[Place] = deque()

    @property
    def waiting(self) -> int:
        """Tokens to be computed."""
        return len(self._waiting)

    def append(self, token: int) -> None:
        """Add a token, to be computed by a later step."""
        self._waiting.append(token)

    def ensure(self, count: int) -> None:
        """Find slots for the next `count` tokens. Raises InvalidArgument for more than a step of this stream may have, or than wait."""
        if not 1 <= count <= min(self.shape.step_tokens, len(self._waiting)):
            raise InvalidArgument(
                f"{count} tokens of a stream in one step: {len(self._waiting)} wait, the most is {self.shape.step_tokens}"
            )
        while len(self.table) + self.dropped < -(-(self.computed + count) // self._size):
            place = self._free.popleft()
            self._used.append(place)
            self.table.append(place.arena, [place.unit])

    def next_tokens(self, count: int) -> list[int]:
        """The next `count` tokens, for the model."""
        return [self._waiting[at] for at in range(count)]

    def positions(self, count: int) -> list[int]:
        """The positions to tell the model of the next `count` tokens: none of them is rotated by it."""
        return [0] * count

    def span(self, count: int, at: int) -> Span:
        """Its part in a step, whose token number `at` is its first."""
        start = self.computed - self.dropped * self._size
        view = StreamView(self.shape, self._rotation, self.computed, count, self.dropped * self._size)
        return Span(self.table, start, count, at, own=view)

    def advance(self, count: int) -> None:
        """A step has filled the next `count` tokens' slots: drops the blocks that no later token attends to."""
        for _ in range(count):
            self._waiting.popleft()
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
        held = [place for place in self._places if place.shared]
        self._places = []
        if held:
            self._cache.store.abandon(slots_of(held))


@dataclass(frozen=True)
class StreamView:
    """How the new tokens of a stream attend in one step: `first` is the number of the first in the whole stream.

    missing   so many tokens between sinks and window are not in the table any more
    """

    shape: StreamShape
    rotation: Rotation
    first: int
    count: int
    missing: int

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Attention of one layer: query [1, q_heads, new token, dim], keys and values [kv_heads, token of the table, dim], unrotated.

        Returns [1, new token, q_heads, dim].
        """
        sinks, window = self.shape.sinks, self.shape.window
        numbers = torch.arange(self.first, self.first + self.count)
        low = max(sinks, self.first - window + 1)  # the first token after the sinks that any of them sees
        early = torch.arange(min(sinks, self.first + self.count))
        late = torch.arange(low, max(low, self.first + self.count))
        # Distances inside the window are as they were; those to the sinks are as if nothing lay between sinks and window.
        parts = [
            (early, early, numbers.clamp(max=sinks + window - 1)),
            (late - self.missing, late - low + sinks, numbers - low + sinks),
        ]
        seen = torch.cat((early <= numbers[:, None], (late <= numbers[:, None]) & (late > numbers[:, None] - window)), dim=1)
        scores = torch.cat([self._scores(query[0], keys[:, at], places, own) for at, places, own in parts], dim=-1) * scaling
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        kept = torch.cat([values[:, at] for at, _, _ in parts], dim=1)
        out = weights.view(kept.shape[0], -1, kept.shape[1]) @ kept
        return out.view(1, query.shape[1], self.count, -1).transpose(1, 2).contiguous()

    def _scores(self, query: Tensor, keys: Tensor, places: Tensor, own: Tensor) -> Tensor:
        """[q_head, new token, key] with keys [kv_head, key, dim] at `places` and queries at `own`."""
        query, keys = self.rotation.rotate(query, own), self.rotation.rotate(keys, places)
        grouped = query.reshape(keys.shape[0], -1, query.shape[-1])
        return (grouped @ keys.transpose(1, 2)).view(query.shape[0], self.count, -1)
