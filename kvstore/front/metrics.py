"""What Prometheus is shown of the front door."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvstore.front.workers import Worker, Workers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds: from a short prompt on a GPU to a long one on a CPU


class Metrics:
    """Counts what is sent to whom. On the loop's thread."""

    def __init__(self, workers: Workers) -> None:
        self._registry = CollectorRegistry()
        self._workers = workers
        self._requests = Counter("kvstore_front_requests_total", "Requests by status", ["status"], registry=self._registry)
        by = ["worker", "role", "outcome"]
        self._sent = Counter("kvstore_front_sent_total", "Requests sent to workers, by what came of them", by, registry=self._registry)
        self.retries = Counter("kvstore_front_retries_total", "Requests that another worker had to answer", registry=self._registry)
        self.prefill = Histogram(
            "kvstore_front_prefill_seconds", "Until a prompt was in the store", buckets=BUCKETS_S, registry=self._registry
        )
        self.first = Histogram("kvstore_front_first_piece_seconds", "Until an answer began", buckets=BUCKETS_S, registry=self._registry)
        self._well = Gauge("kvstore_front_worker_up", "1: it takes requests", ["worker", "role"], registry=self._registry)
        self._load = Gauge("kvstore_front_worker_requests", "Requests under way", ["worker", "role"], registry=self._registry)

    def answered(self, status: int) -> None:
        """A client's request has this status."""
        self._requests.labels(str(status)).inc()

    def sent(self, worker: Worker, outcome: str) -> None:
        """A worker was asked: its status, `lost`, or `broken` in the middle of a stream."""
        self._sent.labels(worker.url, worker.role, outcome).inc()

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        for each in self._workers.all:
            self._well.labels(each.url, each.role).set(each.well)
            self._load.labels(each.url, each.role).set(each.load)
        return bytes(generate_latest(self._registry))
