"""The scheduler's half of the vLLM connector: each step's plan for the workers, and what their reports change.

Called by the scheduler's thread alone; nothing here waits. Blocks are stored from what earlier steps computed: a step's own tokens count
once its result is known, so that drafts which are rejected, and what is computed after a load that failed, never are.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.clients.vllm_holds import Holds
from kvstore.clients.vllm_lookups import Lookups
from kvstore.clients.vllm_plan import Freed, SaveJob, StepPlan, WorkerFacts
from kvstore.clients.vllm_requests import Tracked
from kvstore.clients.vllm_settings import Settings
from kvstore.hashing import HASH_BYTES, Identity

if TYPE_CHECKING:
    from kvstore.clients.vllm_events import Events

MOMENT_S = 0.2  # seconds that others wait for blocks that are being saved; a save takes a few milliseconds, unless the daemon is ill

BlockIds = Callable[[str], Sequence[Sequence[int]]]  # where a request's blocks lie in the engine, by its id: of each KV cache group


class SchedulerHalf:
    """See the module's text."""

    def __init__(self, place: str, identity: Identity, settings: Settings, events: Events | None = None) -> None:
        """events   tells routers what the store has; None where nobody wants to know."""
        self.events = events
        self.holds = Holds()
        self.lookups = Lookups(place, identity, settings, self.holds, events)
        self._tracked = self.lookups.tracked
        self._saves: list[SaveJob] = []  # of requests that have ended, for the next plan
        self._finished: set[str] = set()  # requests that have ended, for the next plan
        self._kept: dict[str, float] = {}  # requests that have ended and whose blocks are kept until the workers report them; since when
        self._step = 0  # the last step that was planned

    @property
    def keeps_blocks(self) -> bool:
        """Blocks of requests that have ended will be free in a moment."""
        return self.holds.younger_than(MOMENT_S) or any(time.monotonic() - since < MOMENT_S for since in self._kept.values())

    @property
    def goes_on(self) -> bool:
        """Steps must go on: blocks are held for saves, or a router is to be told in a moment of what was just stored."""
        return bool(self.holds) or (self.events is not None and self.events.awaited)

    def introduce(self, facts: Iterable[WorkerFacts]) -> None:
        """What the workers' tensors are, in the order of their ranks."""
        self.lookups.introduce(facts)

    def plan(self, output: Any, block_ids: BlockIds) -> StepPlan:
        """The plan of the step that vLLM's SchedulerOutput describes."""
        self._step += 1
        lookups = self.lookups
        plan = StepPlan(self._step, lookups.shards, lookups.loads, self._saves, lookups.restarted, self._finished)
        for tracked in self._tracked.values():
            if tracked.request.num_preemptions != tracked.preemptions:
                plan.stop.add(tracked.request.request_id)
                self.holds.drop(tracked)
            elif not tracked.loading:
                plan.saves.extend(self._saves_of(tracked, block_ids))
                if tracked.storing and (scheduled := output.num_scheduled_tokens.get(tracked.request.request_id)):
                    self.holds.extend(tracked, (tracked.request.num_computed_tokens + scheduled) // tracked.block_tokens)
        loading = any(tracked.loading for tracked in self._tracked.values())
        awaited = lookups.put_off or loading or bool(self._kept) or self.goes_on
        plan.idle = output.total_num_scheduled_tokens == 0 and awaited
        lookups.loads, self._saves, lookups.restarted, self._finished, lookups.put_off = [], [], set(), set(), False
        return plan

    def report(self, output: Any) -> None:
        """What vLLM's KVConnectorOutput says of a step that was run."""
        if output.invalid_block_ids:
            self.lookups.failed(set(output.invalid_block_ids))
        for request_id in output.failed_recving or ():
            self.lookups.failed_whole(request_id)
        for request_id in output.finished_recving or ():
            self.lookups.loaded(request_id)
        for request_id in output.finished_sending or ():
            self._kept.pop(request_id, None)
        if isinstance(output.kv_connector_worker_meta, Freed):
            self.holds.freed(output.kv_connector_worker_meta.workers)

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> bool:
        """A request has ended. Whether its blocks must be kept until the workers report it."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False
        if tracked.loading:
            tracked.ended = True  # the scheduler keeps its blocks until the load is reported
            return False
        del self._tracked[request.request_id]
        tracked.drop_lease()
        if request.num_preemptions == tracked.preemptions:
            self._saves.extend(self._saves_of(tracked, lambda _: block_ids))
        self.holds.drop(tracked)
        if tracked.stored_blocks == 0 or request.num_preemptions != tracked.preemptions:  # then it has no blocks
            return False
        self._finished.add(request.request_id)
        self._kept[request.request_id] = time.monotonic()
        return True

    def reset(self) -> None:
        """The weights may have changed: nothing that was stored before is found, and nothing that runs now is stored."""
        self.lookups.new_generation(uuid.uuid4().hex)
        for job in self._saves:
            self.holds.call_off(job.number)
        self._saves.clear()

    def close(self) -> None:
        """Give everything back."""
        self.lookups.close()
        if self.events is not None:
            self.events.close()

    def _saves_of(self, tracked: Tracked, block_ids: BlockIds) -> list[SaveJob]:
        """The jobs for full blocks that are computed and whose save was not sent yet; their count is noted."""
        begin, end = tracked.stored_blocks, tracked.computed_blocks()
        if end <= begin or not tracked.storing or tracked.request.num_computed_tokens == 0:
            return []
        request_id = tracked.request.request_id
        tracked.stored_blocks = end
        hashes = tracked.hashes_of(end)[begin * HASH_BYTES :]
        if self.events is not None:
            self.events.used(tracked.request, begin, hashes, tracked.block_tokens, leased=False)
        jobs = []
        for group, facts in enumerate(self.lookups.groups):
            if facts.window_tokens:
                runs = self.holds.runs(tracked, group, begin, end)
            else:
                runs = [(0, begin, tuple(block_ids(request_id)[group][begin:end]))]
            for number, first, ids in runs:
                mine = hashes[(first - begin) * HASH_BYTES : (first - begin + len(ids)) * HASH_BYTES]
                jobs.append(SaveJob(request_id, mine, tracked.parent_of(first), ids, group, number))
        return jobs
