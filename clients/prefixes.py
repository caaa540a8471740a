"""Leases for a scheduler that must not wait: submitted, then polled. One session, one group with a namespace for each rank.

`begin` and `poll` take microseconds. A thread of its own attaches, and attaches again after the daemon was away; until then nothing is
found. Calls may come from one thread; leases outlive the session that made them for as long as they are held.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import grpc

from kvstore import errors
from kvstore.clients import requests
from kvstore.clients.arena import Arena
from kvstore.clients.channel import CALL_TIMEOUT_S, OPTIONS, error_of
from kvstore.clients.handles import Attached
from kvstore.clients.link import Link, Unmapped
from kvstore.clients.session import Granting
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.kvstore_pb2_grpc import KVStoreStub

RETRY_S = 1.0  # seconds between attempts to reach a daemon that is away: each costs a thread's wait, none the caller's
SOON_S = 0.5  # seconds in which an attempt to attach succeeds, if it does: a caller may wait so long for it, and no longer
QUIET_S = 2.0  # seconds in which nothing is asked after an answer did not come in time: the next requests would wait in vain too
GRACE_S = 0.25  # seconds past an acquire's own deadline until it is taken as it is: the daemon answers at the deadline itself

HOLE = 0xFFFFFFFF  # in the place of a slot: the member keeps a window, and the block lies before it

log = logging.getLogger("kvstore.prefixes")


@dataclass(frozen=True)
class _Live:
    link: Link
    attached: Attached
    arena: Arena
    group: str


class PrefixLease:
    """One Acquire under way, or what it was granted: `units` one tuple a member, of the slots of the leading blocks, or HOLE."""

    def __init__(self, live: _Live, lease: int, future: Future[Granting], deadline_at: float, late: Callable[[], None]) -> None:
        self._live, self._lease, self._future, self._deadline_at, self._late = live, lease, future, deadline_at, late
        self._released = False
        self.settled = False
        self.units: tuple[tuple[int, ...], ...] = ()

    @property
    def arena(self) -> Arena:
        """Where the slots lie."""
        return self._live.arena

    @property
    def blocks(self) -> int:
        """Leading blocks that every member was granted."""
        return len(self.units[0]) if self.units else 0

    def poll(self) -> bool:
        """Whether it is decided: granted, refused, or its deadline has passed (then what was granted by then counts)."""
        if self.settled:
            return True
        if not self._future.done() and time.monotonic() < self._deadline_at:
            return False
        granting = self._live.link.granted(self._lease)
        self.settled = True
        if granting.error is None:
            self.units = tuple(tuple(int(unit) for unit in member) for member in granting.units)
        if not granting.settled:
            if not self.blocks:
                self._late()
            self._tell([requests.release(self._lease, keep_blocks=granting.blocks)])
        if not self.blocks:
            self.release()
        return True

    def release(self) -> None:
        """Give it back. Idempotent, also before it is decided."""
        if self._released:
            return
        self._released = True
        if not self.settled:
            self._live.link.granted(self._lease)
            self.settled = True
        self.units = ()
        self._tell([requests.release(self._lease)])
        self._live.attached.drop()

    def _tell(self, ops: list[pb.Op]) -> None:
        with contextlib.suppress(errors.KVStoreError):  # the session is over, and its leases with it
            self._live.link.tell(ops)


class Prefixes:
    """See the module's text. `members` are the namespaces, one a rank, in the order in which `PrefixLease.units` has them."""

    def __init__(self, place: str, members: Sequence[pb.OpenNamespaceRequest], name: str) -> None:
        self._place, self._name = place, name
        self._members = list(members)
        self._guard = threading.Lock()  # over what the connecting thread and the caller share
        self._live: _Live | None = None
        self._connecting = False
        self._closed = False
        self._began_at = 0.0
        self._retry_at = 0.0
        self._quiet_until = 0.0
        self._last_error = ""
        self._channel: grpc.Channel | None = None  # made by the connecting thread: grpc does not survive a fork

    @property
    def connecting(self) -> bool:
        """An attempt to attach has begun a moment ago, so that an answer may be had soon."""
        with self._guard:
            return self._connecting and time.monotonic() < self._began_at + SOON_S

    def begin(self, hashes: bytes, timeout_s: float) -> PrefixLease | None:
        """Ask for the leading blocks of packed `hashes`, to be decided within `timeout_s`. None where there is no session now."""
        live = self._ready() if time.monotonic() >= self._quiet_until else None
        if live is None:
            return None
        asked = requests.checked_hashes(hashes[: requests.MAX_BLOCKS_PER_CALL * 32])
        lease = live.link.new_id()
        op = pb.Op(acquire=pb.Acquire(lease=lease, group=live.group, hashes=asked, timeout_s=timeout_s))
        live.attached.hold()
        try:
            future = live.link.begin(op)
        except errors.KVStoreError:
            live.attached.drop()
            return None
        return PrefixLease(live, lease, future, time.monotonic() + timeout_s + GRACE_S, self._be_quiet)

    def close(self) -> None:
        """End the session."""
        with self._guard:
            self._closed = True
            live, self._live = self._live, None
        if live is not None:
            live.link.close()
        if self._channel is not None:
            self._channel.close()

    def _be_quiet(self) -> None:
        self._quiet_until = time.monotonic() + QUIET_S

    def _ready(self) -> _Live | None:
        with self._guard:
            if self._live is not None and self._live.link.alive:
                return self._live
            if not self._closed and not self._connecting and time.monotonic() >= self._retry_at:
                self._connecting, self._began_at = True, time.monotonic()
                before = self._live.arena if self._live else None
                thread = threading.Thread(target=self._connect, args=(before,), name="kvstore-attach", daemon=True)
                thread.start()
            return None

    def _connect(self, before: Arena | None) -> None:
        live: _Live | None = None
        try:
            if self._channel is None:
                self._channel = grpc.insecure_channel(self._place, OPTIONS)
            live = _attach(KVStoreStub(self._channel), self._place, self._members, self._name, before)
        except errors.KVStoreError as error:
            self._complain(str(error))
        except Exception as error:  # noqa: BLE001 — a thread's edge: whatever breaks here, the next attempt must come
            self._complain(repr(error))
        with self._guard:
            self._connecting = False
            self._retry_at = time.monotonic() + RETRY_S
            if live is not None and not self._closed:
                self._live, live = live, None
                self._last_error = ""
        if live is not None:
            live.link.close()

    def _complain(self, text: str) -> None:
        if text != self._last_error:
            log.warning("nothing is found in the store for now: %s", text)
        self._last_error = text


def _attach(stub: KVStoreStub, place: str, members: Sequence[pb.OpenNamespaceRequest], name: str, before: Arena | None) -> _Live:
    link = Link(stub, place, requests.hello(name, 0, 0), before)
    try:
        opened = link.open()
        if isinstance(opened, Unmapped):
            raise errors.Unavailable(f"blocks need the arena in this process: {opened.error}")
        replies = [stub.OpenNamespace(member, timeout=CALL_TIMEOUT_S) for member in members]
        group = f"{name}/{uuid.uuid4().hex}"
        session = opened.session
        ids = [reply.namespace_id for reply in replies]
        stub.JoinGroup(pb.JoinGroupRequest(session=session.id, group=group, namespace_ids=ids, epoch=session.epoch), timeout=CALL_TIMEOUT_S)
        if any(reply.epoch != session.epoch for reply in replies):
            raise errors.Unavailable("the daemon was restarted between two calls; try again")
    except grpc.RpcError as error:
        link.close()
        raise error_of(error, place) from None
    except errors.KVStoreError:
        link.close()
        raise
    return _Live(link, opened, opened.arena, group)
