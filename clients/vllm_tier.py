"""vLLM's tiered offloading keeps its chunks in the store: a secondary tier beneath the engine's own host memory. See docs/engines/vllm.md.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "KVStoreTier", "module_path": "kvstore.clients.vllm_tier"}]}}'

vLLM moves chunks between the GPU and its host memory; this moves them between there and the store, for all ranks at once. It lives in the
scheduler's process and its calls never wait: two threads copy, one hears what the store has. A chunk that cannot be loaded is a miss.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadingEvent, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore import errors
from kvstore.clients.client import KVClient
from kvstore.clients.handles import Namespace
from kvstore.clients.patience import Warnings
from kvstore.clients.vllm_presence import Presence
from kvstore.clients.vllm_tier_events import TierEvents
from kvstore.clients.vllm_tier_facts import facts_of

TIMEOUT_S = 2.0  # seconds that a load waits for the store's disk by default; then the chunks are computed
AWAY_S = 1.0  # seconds in which nothing is asked after the daemon could not be reached: each attempt would hold a thread
GROUP_BYTES = 4  # bytes at the end of vLLM's key: the KV cache group
THERE = ("stored", "exists")  # outcomes after which a chunk is in the store; "in_flight": somebody else is about to store it

log = logging.getLogger("kvstore.vllm")

_Parents = dict[bytes, bytes | None]  # by group: the chunk before the job's first
_Copied = tuple[Collection[bytes], Collection[bytes]]  # keys whose copy succeeded, and those of them that are known to be in the store
_Copy = Callable[[Namespace, list[bytes], list[bytes], list[int], _Parents], _Copied]


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc, unused-ignore]
    """See the module's text. Called by the scheduler's thread."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        address: str = "",
        revision: str = "",
        layout: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """address   the daemon's socket or host:port; "" takes KVSTORE_LISTEN, then the daemon's own default

        revision, layout   see vllm_tier_facts;  timeout_s  the longest that a load waits
        Raises ConfigError where nothing says which weights these are.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        device = f"{current_platform.device_type}/{current_platform.get_device_capability()}"
        device = "cpu" if current_platform.device_type == "cpu" else device
        self._facts = facts_of(offloading_spec.config, device, vllm.__version__, self.block_size_bytes, revision, layout)
        self._chunks = np.asarray(primary_kv_view).view(np.uint8)
        self._timeout_s = timeout_s
        self._address = address or None
        self._client = KVClient(self._address, name="vllm-tier")
        self._generation = b""  # of the weights, a new one with each reset; part of a chunk's name
        self._presence = self._listen()
        self._events = TierEvents(self._presence, self._name) if offloading_spec.kv_events_config.enable_kv_cache_events else None
        self._pools = {kind: ThreadPoolExecutor(1, f"kvstore-{kind}") for kind in ("load", "store")}  # loads never wait behind stores
        self._running: set[Future[None]] = set()
        self._finished: queue.SimpleQueue[tuple[TransferJob, JobResult, tuple[bytes, ...], bytes]] = queue.SimpleQueue()
        self._failed: dict[str, set[bytes]] = defaultdict(set)  # by request: what could not be loaded is not promised to it again
        self._ended: dict[str, dict[bytes, bytes]] = defaultdict(dict)  # by request and group: the last chunk that was stored or loaded
        self._live: set[str] = set()  # requests that have not ended
        self._stale: set[str] = set()  # those of them that began before a reset: their chunks may be of weights that are gone
        self._away_until = 0.0
        self._warnings = Warnings(log)

    # ---- vLLM's calls

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Whether the store has the chunk, as far as it told."""
        self._live.add(req_context.req_id)
        if key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        return LookupResult.HIT if self._presence.has(self._name(key)) else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Copy chunks into the store, those that it does not have; nothing of a request that began before a reset."""
        if job_metadata.req_context.req_id in self._stale:
            result = JobResult(job_id=job_metadata.job_id, success=False, successful_keys=None, transfer_time=0.0, transfer_bytes=0)
            self._finished.put((job_metadata, result, (), self._generation))
            return
        self._submit("store", self._store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Copy chunks from the store, for a request that waits for them."""
        self._live.add(job_metadata.req_context.req_id)
        self._submit("load", self._load, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended since it was last asked."""
        results: list[JobResult] = []
        while True:
            try:
                job, result, done, generation = self._finished.get_nowait()
            except queue.Empty:
                return results
            if self._events is not None and generation == self._generation:  # of an earlier one nothing was told any more
                self._events.ended(job.keys, done)
            if job.is_promotion and not result.success and job.req_context.req_id in self._live:
                self._failed[job.req_context.req_id].update(set(job.keys) - set(done))
            results.append(result)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Which chunks came into the store and went; empty unless the engine publishes KV events."""
        return self._events.take() if self._events is not None else ()

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """No wishes of its own."""
        self._live.add(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what was kept for the request."""
        self._live.discard(req_context.req_id)
        self._stale.discard(req_context.req_id)
        self._failed.pop(req_context.req_id, None)
        self._ended.pop(req_context.req_id, None)

    def drain_jobs(self) -> None:
        """Wait for all copies. vLLM resets its caches then: weights may have changed, so nothing from before is found any more."""
        self.drain_copies()
        self._stale |= self._live
        if self._events is not None:
            self._events.forget()
        self._generation = uuid.uuid4().bytes

    def drain_copies(self) -> None:
        """Wait for all copies."""
        wait(set(self._running))

    def shutdown(self) -> None:
        """End the threads and the session; what has not begun is not done."""
        self._presence.stop()
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()
        del self._chunks  # vLLM unmaps the memory

    # ---- the copies, in threads of their own

    def _submit(self, kind: str, copy: _Copy, job: TransferJob) -> None:
        parents: _Parents = {}
        for key in job.keys:
            group = key[-GROUP_BYTES:]
            parents.setdefault(group, self._ended[job.req_context.req_id].get(group))
            self._ended[job.req_context.req_id][group] = self._name(key)
        if self._events is not None:
            self._events.expect(job.keys)
        generation = self._generation
        future = self._pools[kind].submit(self._run, copy, job, parents, generation)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def _run(self, copy: _Copy, job: TransferJob, parents: _Parents, generation: bytes) -> None:
        began_at = time.monotonic()
        done: Collection[bytes] = ()
        there: Collection[bytes] = ()
        try:
            if began_at >= self._away_until:
                keys = list(job.keys)
                names = [_name(key, generation) for key in keys]
                done, there = copy(self._open(), keys, names, job.chunk_ids.tolist(), parents)
        except errors.Unavailable as error:
            self._away_until = time.monotonic() + AWAY_S
            self._warnings.say("chunks are neither stored nor loaded for now", error)
        except Exception as error:  # noqa: BLE001 — a thread's edge: whatever fails here, vLLM must hear that the job has ended
            self._warnings.say("copying chunks failed", error)
        result = JobResult(
            job_id=job.job_id,
            success=len(done) == len(job.keys),
            successful_keys=tuple(done) if job.is_promotion and done else None,
            transfer_time=time.monotonic() - began_at,
            transfer_bytes=len(done) * self.block_size_bytes,
        )
        self._finished.put((job, result, tuple(there), generation))

    def _store(self, space: Namespace, keys: list[bytes], names: list[bytes], chunks: list[int], parents: _Parents) -> _Copied:
        """The keys that are in the store now, or on their way; and those that are. `names` are the store's of each."""
        done, there = [], []
        for group, parent in parents.items():
            mine = [at for at, key in enumerate(keys) if key[-GROUP_BYTES:] == group]
            with self._client.put(space, b"".join(names[at] for at in mine), parent) as put:
                put.write_all([self._chunks[chunks[at]] for at in mine])
            outcomes = list(zip((keys[at] for at in mine), put.names, strict=True))
            there += [key for key, name in outcomes if name in THERE]
            done += [key for key, name in outcomes if name in THERE or name == "in_flight"]
        return done, there

    def _load(self, space: Namespace, keys: list[bytes], names: list[bytes], chunks: list[int], parents: _Parents) -> _Copied:
        """The keys that were loaded: the leading ones of each group, as far as the store has them."""
        done = []
        for group in parents:
            mine = [at for at, key in enumerate(keys) if key[-GROUP_BYTES:] == group]
            with self._client.get(space, b"".join(names[at] for at in mine), timeout_s=self._timeout_s) as lease:
                loaded = lease.copy_into([self._chunks[chunks[at]] for at in mine])
            done += [keys[at] for at in mine[:loaded]]
        return done, done

    def _listen(self) -> Presence:
        client = KVClient(self._address, name="vllm-presence")
        return Presence(client, lambda: client.open_namespace(self._facts.identity, self._facts.geometry))

    def _open(self) -> Namespace:
        return self._client.open_namespace(self._facts.identity, self._facts.geometry)

    def _name(self, key: bytes) -> bytes:
        return _name(key, self._generation)


def _name(key: bytes, generation: bytes) -> bytes:
    """The store's name of a chunk. vLLM's is a hash over tokens, salt, adapter and images, and the group, of one length or another."""
    return hashlib.sha256(b"vllm-offload\0" + (b"reset\0" + generation if generation else b"") + key).digest()
