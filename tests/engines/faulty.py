"""The connector with loads that fail: named in kv_connector_module_path by tests."""

from kvstore.clients.vllm import KVStoreConnector
from kvstore.clients.vllm_plan import LoadJob
from kvstore.clients.vllm_worker import WorkerHalf

fail_at: list[int] = []  # which blocks of each load are reported as failed, and filled with noise


class _FaultyWorker(WorkerHalf):
    def load(self, job: LoadJob, units: tuple[int, ...]) -> set[int]:
        """Load, then spoil the blocks that are to fail."""
        bad = super().load(job, units)
        for at in fail_at:
            if at < len(job.block_ids):
                for run in self._pages._runs:
                    run.bytes[:, job.block_ids[at]] = 0x3F
                bad.add(job.block_ids[at])
        return bad


class FaultyConnector(KVStoreConnector):
    """See the module's text."""

    worker_half = _FaultyWorker
