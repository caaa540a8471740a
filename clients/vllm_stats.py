"""What the vLLM connector did, in vLLM's own forms: for its periodic log line, and for its Prometheus page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Counted by each worker, so a block of two ranks counts twice. Metrics are named vllm:kvstore_<name>.
COUNTS = {
    "loaded_blocks": "Blocks copied from the store into the engine.",
    "load_seconds": "Seconds spent on these copies.",
    "failed_blocks": "Blocks that were to be loaded and were computed instead.",
    "stored_blocks": "Blocks that this engine stored.",
    "known_blocks": "Blocks that were to be stored and were in the store, or on their way there.",
    "unstored_blocks": "Blocks that were to be stored and were not: no time, no room, or no daemon.",
}


class StoreStats(KVConnectorStats):
    """Counts of one interval, by the names of COUNTS."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Begin a new interval."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> StoreStats:
        """Those of two workers, or of two intervals, together."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        return {name: round(count, 3) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Nothing was done."""
        return not any(self.data.values())


class StoreMetrics(KVConnectorPromMetrics):
    """The same as counters, one for each engine of a server."""

    def __init__(self, vllm_config: Any, metric_types: Mapping[Any, Any], labelnames: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        make = metric_types[PrometheusCounter]
        self._counters = {name: make(f"vllm:kvstore_{name}", documentation=text, labelnames=labelnames) for name, text in COUNTS.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval's counts."""
        for name, count in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(count)
