"""The connector with loads that fail: named in kv_connector_module_path by tests."""

import itertools
import time
from collections.abc import Sequence

import numpy as np

from kvstore.clients.vllm import KVStoreConnector
from kvstore.clients.vllm_plan import NO_BLOCK, LoadJob
from kvstore.clients.vllm_worker import WorkerHalf

fail_at: list[int] = []  # which blocks of each `every`th load are reported as failed, and filled with noise
every = 1
slow_s = 0.0  # seconds more that each load takes
_loads = itertools.count(1)


class _FaultyWorker(WorkerHalf):
    def load(self, job: LoadJob, units: Sequence[tuple[int, ...]]) -> set[int]:
        """Load, then spoil the blocks that are to fail."""
        bad = super().load(job, units)
        time.sleep(slow_s)
        for at in [] if next(_loads) % every else fail_at:
            for pages, blocks in zip(self._pages, job.block_ids, strict=True):
                if at < len(blocks) and blocks[at] != NO_BLOCK:
                    noise = np.full(pages.block_bytes, 0x3F, np.uint8)
                    pages.scatter([blocks[at]], [noise])
                    bad.add(blocks[at])
        return bad


class FaultyConnector(KVStoreConnector):
    """See the module's text."""

    worker_half = _FaultyWorker
