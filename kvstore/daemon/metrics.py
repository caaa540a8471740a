"""Prometheus metrics over HTTP, in a thread of their own. Figures are taken on the event loop when somebody asks for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstore import __version__
from kvstore.cache.core import CacheStats, TierFigures
from kvstore.config import split_address
from kvstore.daemon import metrics_http
from kvstore.errors import ConfigError
from kvstore.tiers.base import Health

COLLECT_TIMEOUT_S = 5.0  # seconds for the event loop to answer; Prometheus itself gives up after ten
# Seconds: from a lookup in memory to a wait for the disk.
LATENCY_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Figures:
    """All that the daemon knows of itself at one moment."""

    cache: CacheStats
    tiers: dict[str, TierFigures]  # by name
    health: dict[str, Health]
    block_counts: Counter[tuple[str, str]]  # by operation and outcome
    transfer_counts: Counter[tuple[str, str]]  # by kind and result
    moved_bytes: Counter[str]  # by kind of transfer
    blocks_out: int
    waiting_demotions: int
    reads_queued: int
    longest_transfer_s: float
    watchers: int
    loop_lag_s: float  # the longest in the last seconds


class Metrics(Collector):
    """Counts calls, and shows the daemon's figures to Prometheus."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        """`figures` is called on the running loop."""
        self._figures = figures
        self._loop = asyncio.get_running_loop()
        self._registry = CollectorRegistry()
        self._calls = Histogram(
            "kvstore_rpc_seconds", "Calls by method and status", ["method", "code"], buckets=LATENCY_BUCKETS_S, registry=self._registry
        )
        self._series: dict[tuple[str, str], Histogram] = {}  # by method and code: finding one by its labels takes a lock
        self._registry.register(self)

    def serve(self, address: str) -> tuple[Callable[[], None], int]:
        """Answer over HTTP on host:port. Returns how to stop it, and the port. Raises ConfigError."""
        host, port = split_address("metrics", address)
        try:
            return metrics_http.serve(self._registry, host, port)
        except OSError as error:
            raise ConfigError(f"metrics on {address}: {error.strerror}; set --metrics to another host:port, or to nothing") from error

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        """A call of this method ended with this status."""
        series = self._series.get((method, code))
        if series is None:
            series = self._series[method, code] = self._calls.labels(method, code)
        series.observe(seconds)

    def describe(self) -> list[Metric]:
        """Names are known when figures are; nothing is asked of the loop at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Called by the HTTP thread."""
        future = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
        try:
            figures = future.result(COLLECT_TIMEOUT_S)
        except FutureTimeout:
            future.cancel()
            return
        yield from _tiers(figures)
        yield from _counts(figures)
        yield from _gauges(figures)

    async def _take(self) -> Figures:
        return self._figures()


def _tiers(figures: Figures) -> Iterator[Metric]:
    capacity = GaugeMetricFamily("kvstore_tier_capacity_bytes", "Size of a tier", labels=["tier"])
    classes = GaugeMetricFamily("kvstore_tier_bytes", "Bytes of a tier by what they are; they add up to its size", labels=["tier", "class"])
    blocks = GaugeMetricFamily("kvstore_tier_blocks", "Blocks in a tier", labels=["tier"])
    held = GaugeMetricFamily("kvstore_tier_held_bytes", "Bytes of a tier that leases, reservations and orphans keep", labels=["tier"])
    health = GaugeMetricFamily("kvstore_tier_health", "1 for the state that a tier is in", labels=["tier", "state"])
    for name, numbers in figures.tiers.items():
        capacity.add_metric([name], numbers.capacity_bytes)
        blocks.add_metric([name], numbers.blocks)
        held.add_metric([name], numbers.held_bytes)
        for kind, size_bytes in numbers.class_bytes.items():
            classes.add_metric([name, kind], size_bytes)
    for name, state in figures.health.items():
        health.add_metric([name, state.state.value], 1)
    return iter((capacity, classes, blocks, held, health))


def _counts(figures: Figures) -> Iterator[Metric]:
    text = "Blocks or operations of sessions by outcome; of an acquire also its blocks, those found and those missed"
    outcomes = CounterMetricFamily("kvstore_operations", text, labels=["operation", "outcome"])
    for (operation, outcome), number in figures.block_counts.items():
        outcomes.add_metric([operation, outcome], number)
    transfers = CounterMetricFamily("kvstore_transfers", "Copies between tiers by result", labels=["kind", "result"])
    for (kind, result), number in figures.transfer_counts.items():
        transfers.add_metric([kind, result], number)
    moved = CounterMetricFamily("kvstore_transferred_bytes", "Bytes copied between tiers, or looked at where they lie", labels=["kind"])
    for kind, size_bytes in figures.moved_bytes.items():
        moved.add_metric([kind], size_bytes)
    events = CounterMetricFamily("kvstore_cache_events", "What the cache did: evictions, corruption, sessions lost, ...", labels=["event"])
    for event, number in figures.cache.counters.items():
        events.add_metric([event], number)
    passes = CounterMetricFamily("kvstore_scrub_passes", "Times that the background check has come by every block")
    passes.add_metric([], figures.cache.scrub_passes)
    return iter((outcomes, transfers, moved, events, passes))


def _gauges(figures: Figures) -> Iterator[Metric]:
    sessions = GaugeMetricFamily("kvstore_sessions", "Attached sessions, and ended ones whose processes may live", labels=["state"])
    ended = sum(session.ended for session in figures.cache.sessions)
    sessions.add_metric(["attached"], len(figures.cache.sessions) - ended)
    sessions.add_metric(["ended"], ended)
    build = GaugeMetricFamily("kvstore_build_info", "1, with the version", labels=["version"])
    build.add_metric([__version__], 1)
    yield from (sessions, build)
    for name, text, value in (
        ("kvstore_index_capacity_blocks", "Blocks that the index has room for", figures.cache.index_capacity_blocks),
        ("kvstore_index_used_blocks", "Rows of the index in use", figures.cache.index_used_blocks),
        ("kvstore_tail_blocks", "Blocks whose token ids are kept, in namespaces with tails", figures.cache.tail_blocks),
        ("kvstore_tail_bytes", "What these token ids take, beside the index and the tiers", figures.cache.tail_bytes),
        ("kvstore_tail_capacity_bytes", "What token ids may take; 0 where no namespace has tails", figures.cache.tail_capacity_bytes),
        ("kvstore_waiting_writes", "Blocks that wait to be copied down", figures.cache.waiting_writes),
        ("kvstore_waiting_demotions", "Blocks of GPU memory that wait to be copied to host memory", figures.waiting_demotions),
        ("kvstore_waiting_reads", "Blocks that wait to be copied up", figures.reads_queued),
        ("kvstore_transfers_out", "Blocks being copied now", figures.blocks_out),
        ("kvstore_longest_transfer_seconds", "For how long the oldest copy has been under way", figures.longest_transfer_s),
        ("kvstore_scrub_pass_seconds", "What the last whole pass of the background check took; 0 before", figures.cache.scrub_pass_s),
        ("kvstore_watchers", "Attached watchers", figures.watchers),
        ("kvstore_loop_lag_seconds", "The longest that the event loop was late in the last seconds", figures.loop_lag_s),
    ):
        yield GaugeMetricFamily(name, text, value=value)
