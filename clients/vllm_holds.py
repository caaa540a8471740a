"""Engine blocks that vLLM's windows leave behind before they are stored: kept in its block pool until the workers have copied them.

vLLM gives up a block of a window as the next step begins, before its tokens are known to be accepted. Here every full block of such a
layer group is held from the step that computes it until its save has ended. Called by the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.clients.vllm_requests import Tracked


@dataclass
class _Job:
    """Blocks that a SaveJob reads, and how many workers still do."""

    blocks: list[Any]
    workers: int
    since: float


class Holds:
    """See the module's text. `manager` is vLLM's KVCacheManager."""

    def __init__(self) -> None:
        self.manager: Any = None
        self._windowed: tuple[int, ...] = ()  # the KV cache groups with windows
        self._workers = 0
        self._jobs: dict[int, _Job] = {}
        self._last = 0

    def introduce(self, windowed: Iterable[int], workers: int) -> None:
        """The KV cache groups with windows, and how many workers save."""
        self._windowed, self._workers = tuple(windowed), workers

    def __bool__(self) -> bool:
        """Whether blocks are held for saves that are under way."""
        return bool(self._jobs)

    def younger_than(self, age_s: float) -> bool:
        """Whether some of these saves began less than so many seconds ago."""
        return any(time.monotonic() - job.since < age_s for job in self._jobs.values())

    def extend(self, tracked: Tracked, blocks: int) -> None:
        """The request will have so many full blocks when this step has run: hold those that are not stored."""
        begin = max(tracked.held_until, tracked.stored_blocks)
        if not self._windowed or blocks <= begin:
            return
        tables = self.manager.get_blocks(tracked.request.request_id).blocks
        for group in self._windowed:
            for number, block in enumerate(tables[group][begin:blocks], begin):
                if not block.is_null:
                    self.manager.block_pool.touch([block])
                    tracked.held[group, number] = block
        tracked.held_until = blocks

    def runs(self, tracked: Tracked, group: int, begin: int, end: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """What is held of blocks `begin` .. `end`: of each run the number of a save that reads it, its first block, and the engine's ids.

        They stay held until all workers have reported that number.
        """
        found: list[tuple[int, list[Any]]] = []
        for number in range(begin, end):
            block = tracked.held.pop((group, number), None)
            if block is None:
                continue
            if found and found[-1][0] + len(found[-1][1]) == number:
                found[-1][1].append(block)
            else:
                found.append((number, [block]))
        runs = []
        for first, blocks in found:
            self._last += 1
            self._jobs[self._last] = _Job(blocks, self._workers, time.monotonic())
            runs.append((self._last, first, tuple(int(block.block_id) for block in blocks)))
        return runs

    def freed(self, workers: Mapping[int, int]) -> None:
        """Numbers of saves that are over, and in how many workers."""
        for number, count in workers.items():
            job = self._jobs.get(number)
            if job is None:
                continue
            job.workers -= count
            if job.workers <= 0:
                del self._jobs[number]
                self._free(job.blocks)

    def call_off(self, number: int) -> None:
        """A save that no worker was told of."""
        self.freed({number: self._workers})

    def drop(self, tracked: Tracked) -> None:
        """Nothing more of the request is saved, beyond what was begun."""
        self._free(tracked.held.values())
        tracked.held.clear()

    def _free(self, blocks: Iterable[Any]) -> None:
        """Give blocks back, the last ones first, as vLLM does: a chain goes from its end."""
        self.manager.block_pool.free_blocks(reversed(list(blocks)))
