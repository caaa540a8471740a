"""A worker's half of the vLLM connector: carries out each step's plan, on two threads of its own, and reports what was done.

Loads never wait behind saves. A save holds its source blocks only while it copies; until then it can be called off, so that blocks are
given back in time whatever the daemon does. Called by the worker's main thread; only `stop` waits, for the copy of one block.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from enum import Enum

from kvstore import errors
from kvstore.clients.arena import Arena
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.patience import Warnings
from kvstore.clients.vllm_facts import members_of
from kvstore.clients.vllm_pages import EnginePages
from kvstore.clients.vllm_plan import NO_BLOCK, ArenaPlace, LoadJob, SaveJob, StepPlan, WorkerFacts
from kvstore.clients.vllm_settings import Settings
from kvstore.hashing import Identity

IDLE_WAIT_S = 0.001  # seconds that a step without work waits for a load: the engine would only spin, and keep threads from running
AWAY_S = 1.0  # seconds in which nothing is saved after the daemon could not be reached

log = logging.getLogger("kvstore.vllm")


class _Stage(Enum):
    WAITING = 0
    COPYING = 1
    DONE = 2


class _Save:
    """One SaveJob on its way; `stage` and `called_off` are guarded by the half's condition."""

    def __init__(self, job: SaveJob, give_up_at: float) -> None:
        self.job, self.give_up_at = job, give_up_at
        self.stage = _Stage.WAITING
        self.called_off = False


class WorkerHalf:
    """See the module's text."""

    def __init__(self, place: str, identity: Identity, settings: Settings, facts: WorkerFacts, pages: Sequence[EnginePages]) -> None:
        """pages   of each KV cache group"""
        self._place, self._identity, self._settings, self._facts, self._pages = place, identity, settings, facts, pages
        self._changed = threading.Condition()  # guards all that the threads share
        self._saves: dict[str, list[_Save]] = {}  # by request: those that still need their source
        self._finishing: set[str] = set()  # requests whose blocks the scheduler keeps for their saves
        self._loaded: set[str] = set()
        self._failed: set[str] = set()  # of those, where a part that failed spoils the whole
        self._bad_blocks: set[int] = set()
        self._held: list[_Save] = []  # whose blocks the scheduler holds
        self._counts: dict[str, float] = {}  # by the names of vllm_stats.COUNTS, since they were last taken
        self._idle = False
        self._load_queue: queue.SimpleQueue[tuple[LoadJob, int] | None] = queue.SimpleQueue()
        self._save_queue: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []  # started with the first plan: they do not survive a fork
        self._arena: Arena | None = None
        self._namespaces: dict[int, Namespace] = {}  # by KV cache group
        self._away_until = 0.0
        self._warnings = Warnings(log)
        self.last_step = 0

    # ---- the worker's main thread

    def stop(self, plan: StepPlan) -> None:
        """Before the step: blocks of the plan's `stop` may be given to others in it. Their saves are called off, or end now."""
        with self._changed:
            for request in plan.stop:
                for save in self._saves.pop(request, []):
                    save.called_off = True
                    self._changed.wait_for(lambda save=save: save.stage is not _Stage.COPYING)  # type: ignore[misc]

    def start(self, plan: StepPlan) -> None:
        """Begin what the plan asks for. A plan that was begun is not begun again."""
        if plan.number == self.last_step:
            return
        self.last_step = plan.number
        self._idle = plan.idle
        self._run_threads()
        give_up_at = time.monotonic() + self._settings.save_timeout_s
        saves = [_Save(job, give_up_at) for job in plan.saves]
        with self._changed:
            self._finishing |= plan.finished
            self._held += [save for save in saves if save.job.number]
            for save in saves:
                self._saves.setdefault(save.job.request, []).append(save)
        for save in saves:
            self._save_queue.put(save)
        for job in plan.loads:
            self._load_queue.put((job, plan.shards.index(self._facts.shard)))

    def finished(self) -> tuple[set[str], set[str], set[str]]:
        """Requests whose saves, and whose loads, have ended since it was last asked, each once; and those whose loads failed as a whole."""
        with self._changed:
            if self._idle and not self._loaded:
                self._changed.wait(IDLE_WAIT_S)
            saved = {request for request in self._finishing if self._is_saved(request)}
            self._finishing -= saved
            loaded, self._loaded = self._loaded, set()
            failed, self._failed = self._failed, set()
        return saved, loaded, failed

    def freed(self) -> list[int]:
        """Numbers of the saves whose blocks are needed no more, since it was last asked. Saves whose time is up are called off."""
        if not self._held:
            return []
        with self._changed:
            over = [save for save in self._held if not self._is_needed(save)]
            self._held = [save for save in self._held if save not in over]
        return [save.job.number for save in over]

    def bad_blocks(self) -> set[int]:
        """Engine blocks that were to be loaded and were not, since it was last asked."""
        with self._changed:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def counts(self) -> dict[str, float]:
        """What was done since it was last asked."""
        with self._changed:
            counts, self._counts = self._counts, {}
        return counts

    def close(self) -> None:
        """End the threads; what is being saved is finished, what waits is dropped."""
        with self._changed:
            for saves in self._saves.values():
                for save in saves:
                    save.called_off = True
        self._load_queue.put(None)
        self._save_queue.put(None)
        for thread in self._threads:
            thread.join(self._settings.save_timeout_s)
        if not any(thread.is_alive() for thread in self._threads):
            for pages in self._pages:
                pages.close()

    def _is_saved(self, request: str) -> bool:
        """Whether nothing reads the request's blocks any more; saves whose time is up are called off. Under the condition."""
        if any(self._is_needed(save) for save in self._saves.get(request, [])):
            return False
        self._saves.pop(request, None)
        return True

    @staticmethod
    def _is_needed(save: _Save) -> bool:
        """Whether the save still reads the engine's blocks, or will; one whose time is up is called off. Under the condition."""
        if time.monotonic() >= save.give_up_at:
            save.called_off = True
        return save.stage is _Stage.COPYING or (save.stage is _Stage.WAITING and not save.called_off)

    # ---- the loading thread

    def _add(self, **counts: float) -> None:
        """Count what was done. Under the condition."""
        for name, count in counts.items():
            if count:
                self._counts[name] = self._counts.get(name, 0) + count

    def _run_threads(self) -> None:
        if not self._threads:
            for target, name in ((self._load_all, "kvstore-load"), (self._save_all, "kvstore-save")):
                self._threads.append(threading.Thread(target=target, name=name, daemon=True))
                self._threads[-1].start()

    def _load_all(self) -> None:
        while (work := self._load_queue.get()) is not None:
            job, shard = work
            began_at = time.monotonic()
            wanted = sum(block != NO_BLOCK for group in job.block_ids for block in group)
            bad = self.load(job, job.units[shard * len(self._pages) :])
            with self._changed:
                self._add(loaded_blocks=wanted - len(bad), failed_blocks=len(bad), load_seconds=time.monotonic() - began_at)
                if not self._facts.fails_whole:
                    self._bad_blocks.update(bad)
                elif bad:
                    self._failed.add(job.request)
                self._loaded.add(job.request)
                self._changed.notify_all()

    def load(self, job: LoadJob, units: Sequence[tuple[int, ...]]) -> set[int]:
        """Copy each slot into its engine block. Returns the engine blocks that could not be filled.

        units   this worker's slots, by KV cache group; further ones are another shard's
        """
        try:
            arena = self._map(job.arena)
            for pages, mine, blocks in zip(self._pages, units, job.block_ids, strict=False):
                wanted = [(unit, block) for unit, block in zip(mine, blocks, strict=True) if block != NO_BLOCK]
                pages.scatter([block for _, block in wanted], [pages.source(arena, unit) for unit, _ in wanted])
        except Exception as error:  # noqa: BLE001 — a thread's edge: whatever fails here, the request must go on and compute
            log.warning("a load of %d blocks failed, they are computed: %s", len(job.block_ids[0]), error)
            return {block for group in job.block_ids for block in group if block != NO_BLOCK}
        return set()

    def _map(self, place: ArenaPlace) -> Arena:
        if self._arena is None or self._arena.inode != place.inode:
            self._arena = Arena(place.path, place.header_bytes, place.arena_bytes)
        if self._arena.inode != place.inode:
            raise errors.Unavailable(f"arena {place.path} is another daemon's by now; the blocks are gone with the one before")
        return self._arena

    # ---- the saving thread

    def _save_all(self) -> None:
        client: KVClient | None = None
        try:
            while (save := self._save_queue.get()) is not None:
                if client is None:
                    client = KVClient(self._place, name="vllm")
                outcomes: Sequence[str] = ()
                try:
                    if time.monotonic() >= self._away_until:
                        outcomes = self.save(client, save)
                except errors.Unavailable as error:
                    self._away_until = time.monotonic() + AWAY_S
                    self._warnings.say("blocks are not stored for now", error)
                except Exception as error:  # noqa: BLE001 — a thread's edge: a block that is not stored is a later miss, no more
                    self._warnings.say("a save failed", error)
                finally:
                    self._at(save, _Stage.DONE)
                    self._count(save.job, outcomes)
        finally:
            if client is not None:
                client.close()

    def _count(self, job: SaveJob, outcomes: Sequence[str]) -> None:
        stored, known = outcomes.count("stored"), outcomes.count("exists") + outcomes.count("in_flight")
        with self._changed:
            self._add(stored_blocks=stored, known_blocks=known, unstored_blocks=len(job.block_ids) - stored - known)

    def save(self, client: KVClient, save: _Save) -> Sequence[str]:
        """Store the job's blocks that the store does not have yet, unless it is called off first. The outcome of each block."""
        job, pages = save.job, self._pages[save.job.group]
        if self._is_called_off(save) or time.monotonic() >= save.give_up_at:
            return ()
        namespace = self._namespace(client, job.group)
        with client.put(namespace, job.hashes, job.parent) as put:
            if put.attached is not None:
                pages.write_to(put.attached.arena)  # the first time this pins the arena, which nobody should wait for
            if not self._at(save, _Stage.COPYING):
                return ()
            try:
                blocks = list(put.blocks)
                for start in range(0, len(blocks), pages.copies_at_once):
                    if self._is_called_off(save):
                        break
                    some = blocks[start : start + pages.copies_at_once]
                    pages.gather([job.block_ids[block.index] for block in some], [block.view for block in some])
                    for block in some:
                        block.done()
            finally:
                self._at(save, _Stage.DONE)
        return put.names

    def _at(self, save: _Save, stage: _Stage) -> bool:
        """Move a save on; False where it was called off before it began to copy."""
        with self._changed:
            if stage is _Stage.COPYING and save.called_off:
                return False
            save.stage = stage
            if stage is _Stage.DONE:
                mine = self._saves.get(save.job.request, [])
                if save in mine:
                    mine.remove(save)
                if not mine:
                    self._saves.pop(save.job.request, None)
            self._changed.notify_all()
        return True

    def _is_called_off(self, save: _Save) -> bool:
        with self._changed:
            return save.called_off

    def _namespace(self, client: KVClient, group: int) -> Namespace:
        if group not in self._namespaces:
            of = members_of(self._identity, [self._facts])[group]
            self._namespaces[group] = client.open_namespace(of.identity, of.geometry, of.shard, of.kv_group, of.keep)
        return self._namespaces[group]
