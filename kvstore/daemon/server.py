"""The daemon's life: start, serve, stop in order. One event loop; `run` returns when a signal has ended it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.config import Settings, format_bytes
from kvstore.daemon import logs, sockets, startup
from kvstore.daemon.health_watch import HealthWatch
from kvstore.daemon.metrics import Figures, Metrics
from kvstore.daemon.quick import QuickLookups
from kvstore.daemon.rpc import Edge
from kvstore.daemon.service import Service
from kvstore.daemon.startup import Parts
from kvstore.errors import ConfigError, EnvironmentFault
from kvstore.geometry import UNIT_BYTES
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import add_KVStoreServicer_to_server

TICK_S = 0.1  # seconds between looks at deadlines
COLLECT_TICKS = 2  # ticks between looks for processes that are gone, and at open streams, each a sign of life: 0.2 s
BEAT_TICKS = 10  # ticks between looks at health: 1 s
LAG_WINDOW_TICKS = 100  # ticks that the lag metric looks back: 10 s
PREFAULT_WAIT_S = 1.0  # seconds that readiness waits for memory to be touched: a small arena is whole then
STOP_SLACK_S = 15.0  # seconds past its deadline for an orderly stop to be over: for goodbyes, and to sync what was written
LAST_S = 3.0  # seconds after the last word for the interpreter to end, which waits for its threads
EXIT_HUNG = 1  # exit status where it does not
GOODBYE_S = 1.0  # seconds for clients to hear that the daemon stops
MAX_MESSAGE_BYTES = 4 * 2**20  # 4 MiB: a batch's 8,192 blocks with hashes, parents and token ids are under 2
MAX_CALLS = 8192  # calls under way at once, sessions' streams included
SERVICE = pb.DESCRIPTOR.services_by_name["KVStore"].full_name

log = logging.getLogger(__name__)


def run(settings: Settings, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM, SIGINT or the terminal's end. `say` gets the readiness line.

    Raises ConfigError and FormatError, each with what to do.
    """
    logs.set_up(settings.log)
    with sockets.held(settings.listen), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            runner.run(_serve(settings, say))
        finally:
            _end_anyway(LAST_S)


def _end_anyway(after_s: float) -> None:
    """End the process so soon, though a thread hangs in the system, on a disk that does not answer. What is on disk is as after a crash."""

    def end() -> None:
        log.error("a thread hangs on the disk: ended without it")
        os._exit(EXIT_HUNG)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _serve(settings: Settings, say: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    ends = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
        ends.append(signal.SIGHUP)
    for number in ends:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    daemon = Daemon(settings, await startup.build(settings))
    try:
        await daemon.start()
        try:
            say(daemon.readiness())
        except OSError as error:
            log.warning("nobody reads standard output (%s), so once more: %s", error.strerror, daemon.readiness())
        await stop.wait()
        _end_anyway(settings.shutdown_s + STOP_SLACK_S)
        log.info("stopping: writes have %g s to finish", settings.shutdown_s)
    finally:
        await daemon.stop()
    log.info("stopped")


class Daemon:
    """A daemon whose parts are built."""

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self._settings = settings
        self._parts = parts
        self._hub = parts.hub
        self._service = Service(parts.hub, parts.dram, settings, parts.remember, parts.health)
        self._metrics = Metrics(self._figures)
        self._quick = QuickLookups(settings.listen, self._service.look, self._metrics)
        self._stop_metrics: Callable[[], None] | None = None
        self._metrics_place = ""
        self._health = health.aio.HealthServicer()
        probes = parts.hbm.probes() | ({"nvme": parts.nvme.probe} if parts.nvme is not None else {})
        self._health_watch = HealthWatch(parts.health, self._health, SERVICE, probes)
        self._server = grpc.aio.server(options=_options(settings), maximum_concurrent_rpcs=MAX_CALLS)
        self._ticker: asyncio.Task[None] | None = None
        self._lags: deque[float] = deque(maxlen=LAG_WINDOW_TICKS)

    async def start(self) -> None:
        """Listen. Raises ConfigError where an address is taken."""
        add_KVStoreServicer_to_server(self._service, Edge(self._server, self._metrics))  # type: ignore[arg-type]  # it takes a server's place
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self._listen(f"unix:{self._settings.listen}", "--listen")
        sockets.open_to_group(self._settings.listen)
        if self._settings.tcp:
            self._listen(self._settings.tcp, "--tcp")
            log.warning("calls over TCP are not authenticated: whoever can connect to %s may read, write and clear", self._settings.tcp)
        if self._settings.metrics:
            self._stop_metrics, port = self._metrics.serve(self._settings.metrics)
            self._metrics_place = f"{self._settings.metrics.rpartition(':')[0]}:{port}"
        self._ticker = asyncio.create_task(self._tick())
        await self._touched()
        await self._health_watch.look()
        await self._quick.start()
        await self._server.start()

    def readiness(self) -> str:
        """The line that says that clients may come."""
        dram, nvme = self._parts.dram, self._parts.nvme
        pools = [f"{tier.label} {format_bytes(tier.capacity_bytes)}" for tier in self._parts.hbm.tiers]
        tiers = [*pools, f"dram {format_bytes(dram.capacity_bytes)}", f"nvme {format_bytes(nvme.capacity_bytes) if nvme else 'off'}"]
        metrics = [f"metrics {self._metrics_place}"] if self._metrics_place else []
        return f"kvstore ready on {self._settings.listen} ({', '.join([*tiers, *metrics])})"

    async def stop(self) -> None:
        """Say goodbye, finish writes under the deadline, and leave the disk marked clean. Idempotent parts; called once."""
        deadline = time.monotonic() + self._settings.shutdown_s
        await self._health.enter_graceful_shutdown()
        self._service.shut_down_streams()
        self._quick.stop()
        await self._server.stop(GOODBYE_S)
        await self._finish_writes(deadline)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        if self._stop_metrics is not None:
            await asyncio.to_thread(self._stop_metrics)
        await asyncio.to_thread(self._service.bytes.close)
        await self._close_tiers(deadline)

    # ----

    def _listen(self, address: str, flag: str) -> None:
        try:
            bound = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address} ({error}); choose another {flag}") from error
        if not bound:
            raise ConfigError(f"cannot listen on {address}; choose another {flag}")

    async def _touched(self) -> None:
        """Wait a moment for the memory of a small arena; a large one goes on in the background."""
        deadline = time.monotonic() + PREFAULT_WAIT_S
        dram = self._parts.dram
        whole_units = dram.capacity_bytes // UNIT_BYTES
        while dram.touched_units < whole_units and time.monotonic() < deadline and not dram.prefault_failure:  # noqa: ASYNC110 — a thread's work
            await asyncio.sleep(0.01)
        self._hub.cache.dram_ready(dram.touched_units)

    async def _tick(self) -> None:
        loop, ticks, told_bytes = asyncio.get_running_loop(), 0, 0
        due_at = loop.time()
        while True:
            due_at = max(due_at + TICK_S, loop.time())
            await asyncio.sleep(due_at - loop.time())
            self._lags.append(max(0.0, loop.time() - due_at))
            ticks += 1
            try:
                if ticks % COLLECT_TICKS == 0:
                    self._hub.collect()
                    self._hub.beat()
                if ticks % BEAT_TICKS == 0:
                    logs.flush()
                    await self._health_watch.look()
                    told_bytes = self._tell_prefault(told_bytes)
                self._hub.cache.dram_ready(self._parts.dram.touched_units)
                self._hub.cache.tick(self._hub.now)
                self._hub.settle()
            except Exception:  # the clock's edge: a fault in one tick must not stop the deadlines of all
                log.exception("tick: unexpected")

    def _tell_prefault(self, told_bytes: int) -> int:
        dram = self._parts.dram
        touched_bytes = dram.touched_units * UNIT_BYTES
        if touched_bytes != told_bytes:
            log.info("dram: %s of %s touched", format_bytes(touched_bytes), format_bytes(dram.capacity_bytes))
        return touched_bytes

    def _figures(self) -> Figures:
        (cache, tiers), transfers, demotion = self._hub.figures(), self._hub.transfers, self._hub.demotion
        copies = transfers.counts.copy() if transfers else Counter()
        moved = transfers.moved_bytes.copy() if transfers else Counter()
        if demotion is not None:
            copies.update({("demote", result): count for result, count in demotion.counts.items()})
            moved["demote"] = demotion.moved_bytes
        return Figures(
            cache=cache,
            tiers=tiers,
            health=self._parts.health(),
            block_counts=self._service.block_counts,
            transfer_counts=copies,
            moved_bytes=moved,
            waiting_demotions=demotion.demoter.waiting if demotion else 0,
            blocks_out=transfers.blocks_out if transfers else 0,
            reads_queued=transfers.reads_queued if transfers else 0,
            longest_transfer_s=transfers.longest_out_s() if transfers else 0.0,
            watchers=len(self._hub.notices),
            loop_lag_s=max(self._lags, default=0.0),
        )

    async def _finish_writes(self, deadline: float) -> None:
        transfers, demotion = self._hub.transfers, self._hub.demotion
        while transfers is not None and time.monotonic() < deadline:
            self._hub.settle()
            if transfers.idle and (demotion is None or demotion.demoter.idle) and not self._hub.cache.stats().waiting_writes:
                return
            await asyncio.sleep(0.01)

    async def _close_tiers(self, deadline: float) -> None:
        transfers, nvme, dram = self._hub.transfers, self._parts.nvme, self._parts.dram
        demotion = self._hub.demotion
        copied = demotion is None or await asyncio.to_thread(demotion.close, deadline)
        if not copied:
            log.error("a GPU did not answer in time: what was on its way from there is lost")
        ended = transfers is None or await asyncio.to_thread(transfers.close, max(1.0, deadline - time.monotonic()))
        if not ended:
            log.error("the disk did not answer in time: it is left as after a crash")
            return
        self._hub.collect()
        attached = bool(self._hub.sessions)
        self._hub.sessions.close()
        self._parts.stop_remembering()
        self._parts.hbm.stop_offering()
        if copied:
            self._parts.hbm.close()
        if nvme is not None:
            try:
                await nvme.stop_clean()
            except EnvironmentFault as error:
                log.error("%s: the disk is left as after a crash", error)
                nvme.close()
        if not copied:
            return  # a copy may still write there: mapped to the process's end
        if attached:
            dram.close()  # its processes still have it mapped: the next daemon goes on with it
        else:
            dram.remove()


def _options(settings: Settings) -> list[tuple[str, int]]:
    silence_ms = int(settings.session.silence_s * 1000)
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # A stopped client answers no ping: asked after a third of the silence allowed, given up after the rest.
        ("grpc.keepalive_time_ms", silence_ms // 3),
        ("grpc.keepalive_timeout_ms", silence_ms - silence_ms // 3),
        ("grpc.http2.ping_timeout_ms", silence_ms - silence_ms // 3),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # clients ping every 10 s
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]
