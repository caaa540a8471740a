"""The connector with loads that fail: named in kv_connector_module_path by tests."""

from collections.abc import Sequence

import numpy as np

from kvstore.clients.vllm import KVStoreConnector
from kvstore.clients.vllm_plan import NO_BLOCK, LoadJob
from kvstore.clients.vllm_worker import WorkerHalf

fail_at: list[int] = []  # which blocks of each load are reported as failed, and filled with noise


class _FaultyWorker(WorkerHalf):
    def load(self, job: LoadJob, units: Sequence[tuple[int, ...]]) -> set[int]:
        """Load, then spoil the blocks that are to fail."""
        bad = super().load(job, units)
        for at in fail_at:
            for pages, blocks in zip(self._pages, job.block_ids, strict=True):
                if at < len(blocks) and blocks[at] != NO_BLOCK:
                    noise = np.full(pages.block_bytes, 0x3F, np.uint8)
                    pages.scatter([blocks[at]], [noise])
                    bad.add(blocks[at])
        return bad


class FaultyConnector(KVStoreConnector):
    """See the module's text."""

    worker_half = _FaultyWorker
