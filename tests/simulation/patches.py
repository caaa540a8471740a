"""What is put in the place of what, while a simulation runs. Everything else is the product's own code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.simulation.disk import Disk, Place, SmallFiles, SystemCalls
from tests.simulation.gpus import Gpus
from tests.simulation.lanes import Lanes, Lock, Thread
from tests.simulation.machine import Machine
from tests.simulation.memory import Dram, Memory, map_arena
from tests.simulation.network import Channel, Network, Server

CLOCKED = (
    "daemon.server", "daemon.demotion", "daemon.service", "daemon.startup", "daemon.health_watch", "daemon.rpc", "tiers.health",
    "tiers.nvme",
)  # fmt: skip
FEW = ("slots", "sessions", "state", "singles")  # of the cache: who knows FEW_SLOTS
EXTENT_UNITS = 4  # of the nvme tier: the product's own smallest extent would hold everything


class OwnerLock:
    """There is one daemon at a time: the scene starts none before the last is dead."""

    def __init__(self, *_: Any) -> None:
        pass

    def release(self) -> None:
        pass


class NoLookups:
    """The socket for lookups alone: clients do without it, and look over gRPC."""

    def __init__(self, *_: Any) -> None:
        pass

    async def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


@contextlib.contextmanager
def installed(
    machine: Machine, disk: Disk, memory: Memory, network: Network, gpus: Gpus, few_slots: int, piece_rows: int
) -> Iterator[None]:
    """Inside, the product runs on this machine. `few_slots`, `piece_rows`: a plan's portions."""
    calls = SystemCalls(disk)
    secret = Random(f"{machine.seed} secrets")
    secrets = SimpleNamespace(
        token_hex=lambda count: secret.randbytes(count).hex(), token_bytes=secret.randbytes, randbits=secret.getrandbits,
        compare_digest=bytes.__eq__,
    )  # fmt: skip
    small_files = SmallFiles(disk)
    clock = SimpleNamespace(monotonic=lambda: machine.now)
    table: dict[str, Any] = {
        # how much is done at once
        **{f"kvstore.cache.{module}.FEW_SLOTS": few_slots for module in FEW},
        "kvstore.cache.core.SNAPSHOT_ROWS": piece_rows,
        "kvstore.cache.recovery.CLEAR_ROWS": piece_rows,
        # the network
        "grpc.aio.insecure_channel": partial(Channel, network),
        "grpc.aio.server": partial(Server, network),
        "kvstore.daemon.server.sockets": SimpleNamespace(open_to_group=lambda path: None),
        "kvstore.daemon.server.QuickLookups": NoLookups,
        "kvstore.daemon.server.reflection": SimpleNamespace(SERVICE_NAME="", enable_server_reflection=lambda *_: None),
        # chance, time, and threads
        "kvstore.daemon.startup.secrets": secrets,
        "kvstore.daemon.sessions.secrets": secrets,
        "kvstore.daemon.hbm_parts.secrets": secrets,
        **{f"kvstore.{module}.time": clock for module in CLOCKED},
        "kvstore.daemon.health_watch.threading": SimpleNamespace(Thread=partial(Thread, machine)),
        "kvstore.tiers.direct_io.threading": SimpleNamespace(Lock=partial(Lock, machine)),
        "kvstore.daemon.transfers.Lanes": partial(Lanes, machine),
        "kvstore.daemon.demotion.Lanes": partial(Lanes, machine),
        # shared memory
        "kvstore.daemon.startup.DramTier": partial(Dram, memory),
        "kvstore.clients.aio_link.map_arena": partial(map_arena, memory),
        # GPU memory
        "kvstore.daemon.startup.open_hbm": gpus.opened,
        "kvstore.clients.gpus.ImportedPool": gpus.imported,
        "kvstore.daemon.pools.extent_bytes_for": lambda capacity_bytes: EXTENT_UNITS * 4096,
        # the disk
        "kvstore.daemon.startup.Path": lambda path: Place(disk),
        "kvstore.daemon.startup.extent_bytes_for": lambda capacity_bytes: EXTENT_UNITS * 4096,
        "kvstore.tiers.direct_io.os": calls,
        "kvstore.tiers.nvme_records.os": calls,
        "kvstore.tiers.nvme.os": calls,
        "kvstore.tiers.nvme.allocate": calls.allocate,
        "kvstore.tiers.nvme.sync_directory": small_files.sync_directory,
        "kvstore.tiers.nvme_directory.small_files": small_files,
        "kvstore.tiers.nvme_directory.OwnerLock": OwnerLock,
    }
    with contextlib.ExitStack() as stack:
        for name, replacement in table.items():
            stack.enter_context(mock.patch(name, replacement))
        yield
