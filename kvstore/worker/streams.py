"""What an engine does about streams: which it refuses, how many blocks they may take together, and how one begins."""

import math
from collections.abc import Iterable
from functools import cached_property

from kvstore.errors import InvalidArgument, LimitExceeded
from kvstore.worker.branch import Branch
from kvstore.worker.model import LoadedModel
from kvstore.worker.paged import PagedCache
from kvstore.worker.requests import Request
from kvstore.worker.rotation import Rotation
from kvstore.worker.scheduler import Room
from kvstore.worker.streaming import StreamSequence, StreamShape

STREAMS_PART = 0.75  # of all blocks: streams cannot be stopped, so the rest is what others can always get


def store_tokens(window: int, block_tokens: int) -> int:
    """For how many tokens a store must have room so that one stream may be served. Raises InvalidArgument."""
    return math.ceil(StreamShape(window=window).blocks(block_tokens) / STREAMS_PART) * block_tokens


class Streams:
    """Streams over one cache, in the room that its worker has."""

    def __init__(self, loaded: LoadedModel, cache: PagedCache, room: Room) -> None:
        self._loaded, self._cache, self._room = loaded, cache, room

    @property
    def _most_blocks(self) -> int:
        return int(self._room.capacity_blocks * STREAMS_PART)

    @cached_property
    def _rotation(self) -> Rotation:
        """Made with the first stream. Raises InvalidArgument for a model that has no streams."""
        return Rotation(self._loaded.model)

    def check(self, request: Request) -> None:
        """Raise InvalidArgument and LimitExceeded for a stream that cannot be."""
        shape = StreamShape(request.sinks, request.window)
        if self._cache.gpu is not None:
            raise InvalidArgument("streams are served by a worker whose model is in the host's memory; leave out window")
        if request.n > 1 or request.beams:
            raise InvalidArgument("a stream has one continuation; leave out n and beams, or window")
        if shape.sinks + shape.window > self._loaded.max_tokens:
            raise LimitExceeded(f"sinks and window are {shape.sinks + shape.window} tokens, the model takes {self._loaded.max_tokens}")
        if (blocks := self._blocks(request)) > self._most_blocks:
            raise LimitExceeded(f"the stream needs {blocks} blocks, the store has {self._most_blocks} for streams; take a smaller window")
        _ = self._rotation

    def blocks(self, branch: Branch) -> int:
        """That a stream takes when it begins."""
        return self._blocks(branch.job.request)

    def fits(self, branch: Branch, running: Iterable[Branch]) -> bool:
        """Whether so many blocks may be a stream's beside those that run; the first always: what it cannot have, it is told then."""
        held = sum(self.blocks(each) for each in running if each.is_stream)
        return not held or held + self.blocks(branch) <= self._most_blocks

    def open(self, branch: Branch) -> StreamSequence:
        """Begin, or begin anew."""
        request = branch.job.request
        total = len(request.tokens) + request.max_tokens
        return StreamSequence(self._cache, self._rotation, branch.tokens, StreamShape(request.sinks, request.window), total)

    def _blocks(self, request: Request) -> int:
        return StreamShape(request.sinks, request.window).blocks(self._cache.layout.tokens, len(request.tokens) + request.max_tokens)
