"""vLLM shares prefixes through the store: a connector for its v1 engine. See docs/engines/vllm.md.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.clients.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

The class has two lives, as vLLM wants it: in the scheduler's process and in each worker's. What each does is in vllm_scheduler.py and
vllm_worker.py; here vLLM's calls are handed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvstore.clients.channel import target
from kvstore.clients.vllm_events import Events
from kvstore.clients.vllm_facts import facts_of, identity_of, pages_for
from kvstore.clients.vllm_plan import Freed, StepPlan, WorkerFacts
from kvstore.clients.vllm_scheduler import SchedulerHalf
from kvstore.clients.vllm_settings import Settings
from kvstore.clients.vllm_stats import StoreMetrics, StoreStats
from kvstore.clients.vllm_worker import WorkerHalf
from kvstore.errors import ConfigError


def register() -> None:
    """vLLM's plugin entry point: `kv_connector` may then name the class without its module."""
    if "KVStoreConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVStoreConnector", "kvstore.clients.vllm", "KVStoreConnector")


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's text. Raises ConfigError, as the engine starts, for settings under which it cannot work."""

    worker_half = WorkerHalf  # tests put faults into a subclass of it

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}: set it to 'recompute' in --kv-transfer-config, "
                "so that a block that cannot be loaded is computed instead of failing its request"
            )
        if transfer.kv_role != "kv_both":
            raise ConfigError(f"kv_role is {transfer.kv_role!r}: set it to 'kv_both', every engine reads and writes the store")
        self._settings = Settings.of(transfer.kv_connector_extra_config)
        self._place = target(self._settings.address or None)
        self._identity = identity_of(vllm_config, self._settings.revision)
        events = Events(self._place) if _wants_events(vllm_config) else None
        scheduling = role is KVConnectorRole.SCHEDULER
        self._scheduler = SchedulerHalf(self._place, self._identity, self._settings, events) if scheduling else None
        self._worker: WorkerHalf | None = None
        self._facts = WorkerFacts(refusal="the engine registered no KV tensors")
        self._manager: Any = None
        self._pages_of = pages_for(self._settings.gpu)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, no more."""
        return False

    # ---- the scheduler's process

    @property
    def _planning(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise RuntimeError("this is a worker's connector; vLLM called what belongs to the scheduler's")
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What each worker holds, by (pipeline, tensor) rank."""
        self._planning.introduce([metadata[rank] for rank in sorted(metadata)])

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Where each request's blocks lie."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = self._planning.holds.manager = kv_cache_manager
        if self._planning.events is not None:
            self._planning.events.manager = kv_cache_manager

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens past the engine's own the store will load; None: ask again."""
        return self._planning.lookups.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine's blocks for a promised load."""
        self._planning.lookups.allocated(request, blocks.blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's plan."""
        return self._planning.plan(scheduler_output, self._manager.get_block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers report."""
        self._planning.report(connector_output)

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks are kept until its saves are done."""
        return self._planning.finished(request, (block_ids,)), None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[Sequence[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The same with the blocks of each KV cache group."""
        return self._planning.finished(request, block_ids), None

    def has_pending_block_frees(self) -> bool:
        """Blocks of ended requests will be free soon: no need to preempt."""
        return self._planning.keeps_blocks

    def has_pending_push_work(self) -> bool:
        """Steps go on for a moment: saves end, and what was just stored is published."""
        return self._planning.goes_on

    def take_events(self) -> Iterable[Any]:
        """What the store has and has no more, in vLLM's form; empty unless the engine publishes KV events."""
        return self._planning.events.take() if self._planning.events is not None else ()

    def reset_cache(self) -> bool:
        """The weights may have changed: nothing stored before is found from now on, by this engine."""
        self._planning.reset()
        return True

    # ---- a worker's process

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's KV tensors, once."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        ranks = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        self._facts, pages = facts_of(self._vllm_config, self._kv_cache_config.kv_cache_groups, kv_caches, ranks, self._pages_of)
        if pages:
            self._worker = self.worker_half(self._place, self._identity, self._settings, self._facts, pages)

    def get_handshake_metadata(self) -> Any:
        """What this worker holds."""
        return self._facts

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Blocks are about to be given to other requests."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepPlan):
            self._worker.stop(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads and saves."""
        plan = self._get_connector_metadata()
        if self._worker is not None and isinstance(plan, StepPlan):
            self._worker.start(plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs once all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: blocks are saved whole, in the next step."""

    def wait_for_save(self) -> None:
        """Nothing to wait for: a save's source is kept until it is done."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose saves, and whose loads, have ended, and whose loads failed."""
        return KVConnectorTransferResults(*self._worker.finished()) if self._worker is not None else KVConnectorTransferResults()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Engine blocks that could not be loaded."""
        return self._worker.bad_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Freed | None:
        """Saves that need the engine's blocks no more."""
        numbers = self._worker.freed() if self._worker is not None else []
        return Freed(dict.fromkeys(numbers, 1)) if numbers else None

    def get_kv_connector_stats(self) -> StoreStats | None:
        """What this worker did since it was last asked."""
        counts = self._worker.counts() if self._worker is not None else {}
        return StoreStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats:
        """Stats of this connector, from what was sent between processes."""
        return StoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> StoreMetrics:
        """The counters on vLLM's metrics page."""
        return StoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End threads and sessions."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()


def _wants_events(vllm_config: Any) -> bool:
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)
