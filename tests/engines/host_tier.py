"""vLLM's tiered offloading on a machine without a GPU: its own spec and manager, with a worker that copies between host memories.

vLLM's own worker wants CUDA streams; everything else here is the engine's. Named in spec_module_path by tests.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class _HostWorker(OffloadingWorker):
    """Copies at once; a chunk is one block."""

    def __init__(self, caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._engine = [each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors]
        self._host = [region.create_next_worker_view(each.page_size_bytes) for each in caches.tensors]
        self._tensors_of = [sorted({ref.tensor_idx for ref in group}) for group in caches.group_data_refs]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, self._engine, self._host)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, self._host, self._engine)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, source: Any, target: Any, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> bool:
        sizes = (source if hasattr(source, "group_sizes") else target).group_sizes
        at = 0
        for group, count in enumerate(sizes):
            from_ids, to_ids = (torch.from_numpy(each.block_ids[at : at + count]).long() for each in (source, target))
            for tensor in self._tensors_of[group]:
                targets[tensor][to_ids] = sources[tensor][from_ids]
            at += count
        self._done.append(TransferResult(job_id, True))
        return True


class HostTieringSpec(TieringOffloadingSpec):
    """See the module's text."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return _HostWorker(kv_caches, region)
