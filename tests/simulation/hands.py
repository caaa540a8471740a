"""What an engine holds: slots of its own, and blocks under leases."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.clients.aio_link import AsyncLink
from kvstore.proto import kvstore_pb2 as pb
from tests.simulation.keys import Kind
from tests.simulation.truth import Held

Slot = tuple[int, int]  # units, generation


class Link(AsyncLink):
    """Remembers its Welcome, which names the session to resume."""

    welcome: pb.Welcome | None = None

    def _map(self, welcome: pb.Welcome) -> None:
        self.welcome = welcome
        super()._map(welcome)


@dataclass
class Private:
    """A slot of our own, not visible to anybody."""

    slot: Slot
    kind: Kind
    held: Held | None = None  # once it is filled


@dataclass
class Hands:
    """What the engine holds under one session, or took over from the one before."""

    private: list[Private] = field(default_factory=list)
    leases: dict[int, list[Held]] = field(default_factory=dict)

    def held(self) -> list[Held]:
        return [*(each.held for each in self.private if each.held), *(held for helds in self.leases.values() for held in helds)]
