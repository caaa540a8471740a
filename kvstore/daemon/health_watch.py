"""Shows every tier's health where people and programs look: grpc's health service, and the log when it changes. On the event loop.

A tier that is not well is probed, in a thread of its own since a sick disk may not answer, until it is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from grpc_health.v1 import health, health_pb2

from kvstore.tiers.base import Health, HealthState

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
TIER_SERVICE = "kvstore.tier."  # and the tier's name: what grpc's health service calls it

log = logging.getLogger(__name__)


class HealthWatch:
    """Call `look` about once a second."""

    def __init__(
        self,
        states: Callable[[], dict[str, Health]],
        servicer: health.aio.HealthServicer,
        service: str,
        probes: Mapping[str, Callable[[], None]],
    ) -> None:
        """`states` answers every tier's health; `probes`, by tier, may block, and change what it answers; `service` is the store's."""
        self._states = states
        self._servicer = servicer
        self._service = service
        self._probes = probes
        self._probing: dict[str, threading.Thread] = {}
        self._sick_since: dict[str, float] = {}

    async def look(self) -> None:
        """Show what is, and see to what is not well."""
        states = self._states()
        for tier, state in states.items():
            await self._servicer.set(f"{TIER_SERVICE}{tier}", SERVING if state.state is HealthState.OK else NOT_SERVING)
            self._tell(tier, state)
            if state.state is not HealthState.OK:
                self._probe(tier)
        whole = NOT_SERVING if states["dram"].state is HealthState.FAILED else SERVING
        await self._servicer.set("", whole)
        await self._servicer.set(self._service, whole)

    def _tell(self, tier: str, state: Health) -> None:
        """Log when a tier falls sick and when it is well again; in between, reasons come and go."""
        if state.state is HealthState.OK:
            since = self._sick_since.pop(tier, None)
            if since is not None:
                log.info("%s: well again after %.0f s", tier, time.monotonic() - since)
        elif tier not in self._sick_since:
            self._sick_since[tier] = time.monotonic()
            log.error("%s is %s: %s", tier, state.state, state.reason)

    def _probe(self, tier: str) -> None:
        running = self._probing.get(tier)
        if tier in self._probes and (running is None or not running.is_alive()):
            self._probing[tier] = threading.Thread(target=self._probes[tier], name=f"probe-{tier}", daemon=True)
            self._probing[tier].start()
