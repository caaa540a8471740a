"""What Prometheus is shown of the server, and of the engine behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstore.worker.http.shapes import Counted

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds: from a short prompt on a GPU to a long one that waits its turn on a CPU.
FIRST_TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
# Seconds: between two tokens of one branch.
NEXT_TOKEN_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Seconds: a whole request.
REQUEST_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Metrics:
    """Counts what the server does; asks `figures` for the engine's own when somebody looks. The loop's thread, but for `figures`."""

    def __init__(self, figures: Callable[[], Mapping[str, float]]) -> None:
        self._registry = CollectorRegistry()
        name = "kvstore_worker_"
        self._requests = Counter(f"{name}requests_total", "HTTP requests", ["path", "status"], registry=self._registry)
        self._tokens = Counter(f"{name}tokens_total", "Tokens: prompt, cached (of the prompt), made", ["kind"], registry=self._registry)
        self._first = Histogram(
            f"{name}first_token_seconds", "From arrival to the first token", buckets=FIRST_TOKEN_BUCKETS_S, registry=self._registry
        )
        self._next = Histogram(
            f"{name}next_token_seconds", "Between two tokens of a text", buckets=NEXT_TOKEN_BUCKETS_S, registry=self._registry
        )
        self._took = Histogram(f"{name}request_seconds", "HTTP requests", ["path"], buckets=REQUEST_BUCKETS_S, registry=self._registry)
        self._open = Gauge(f"{name}open_requests", "HTTP requests under way", registry=self._registry)
        self._registry.register(_Figures(figures))

    def began(self) -> None:
        """A request arrived."""
        self._open.inc()

    def ended(self, path: str, status: int, seconds: float) -> None:
        """It is over, with this status; 499 where the client left."""
        self._open.dec()
        self._requests.labels(path, str(status)).inc()
        self._took.labels(path).observe(seconds)

    def counted(self, counted: Counted) -> None:
        """The tokens of a request that is over."""
        for kind, tokens in (("prompt", counted.prompt), ("cached", counted.cached), ("made", counted.made)):
            self._tokens.labels(kind).inc(tokens)

    def first_token(self, seconds: float) -> None:
        """A text has its first token."""
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """A text has another token."""
        self._next.observe(seconds)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return bytes(generate_latest(self._registry))


class _Figures(Collector):
    """The engine's figures at the moment."""

    def __init__(self, figures: Callable[[], Mapping[str, float]]) -> None:
        self._figures = figures

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, value in sorted(self._figures().items()):
            full = f"kvstore_engine_{name}"
            if name.endswith("_total"):
                yield CounterMetricFamily(full, "Of the engine", value=value)
            else:
                yield GaugeMetricFamily(full, "Of the engine", value=value)
