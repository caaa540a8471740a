"""How a pool of GPU memory goes from the daemon to a client: one message over a Unix socket, with a file descriptor where there is one.

The message is a line of JSON. A descriptor stands for the memory itself, so an import outlives the daemon; a CUDA IPC handle does not.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from kvstore.errors import FormatError, Unavailable

VERSION = 1  # version of the message: a reader of another one refuses
MAX_MESSAGE_BYTES = 4096  # bytes: a UUID, a size and a handle in hexadecimal are a tenth of it
ANSWER_S = 5.0  # seconds: the other side has nothing to do but to send, or read, one message

Kind = Literal["descriptor", "ipc"]


@dataclass(frozen=True)
class Offer:
    """A pool: on which GPU, how large, and what it is imported by. `handle` is the IPC handle in hexadecimal, else empty."""

    uuid: str
    size_bytes: int
    kind: Kind
    handle: str = ""
    version: int = VERSION


def send_offer(connection: socket.socket, offer: Offer, descriptor: int | None) -> None:
    """Send it; the descriptor stays the caller's. Raises OSError where the other side is gone or does not read."""
    connection.settimeout(ANSWER_S)
    message = json.dumps(asdict(offer)).encode() + b"\n"
    socket.send_fds(connection, [message], [] if descriptor is None else [descriptor])


def receive_offer(connection: socket.socket) -> tuple[Offer, int | None]:
    """The offer and its descriptor, which the caller closes. Raises Unavailable where none comes, FormatError for another's message."""
    connection.settimeout(ANSWER_S)
    message, descriptors = b"", []
    try:
        while not message.endswith(b"\n") and len(message) < MAX_MESSAGE_BYTES:
            part, found, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 4)
            descriptors += found
            if not part:
                break
            message += part
        offer = _parsed(message)
        if len(descriptors) != (offer.kind == "descriptor"):
            raise FormatError(f"an offer of kind {offer.kind} came with {len(descriptors)} descriptors; use the client of the same release")
    except OSError as error:
        _close(descriptors)
        raise Unavailable(f"the daemon did not offer its GPU memory: {error}") from error
    except BaseException:
        _close(descriptors)
        raise
    return offer, descriptors[0] if descriptors else None


def _parsed(message: bytes) -> Offer:
    if not message:
        raise Unavailable("the daemon closed the connection without an offer of its GPU memory; it may be stopping")
    try:
        facts = json.loads(message)
        if facts["version"] != VERSION:
            raise FormatError(f"the daemon offers GPU memory in version {facts['version']}, not {VERSION}; use the same release for both")
        offer = Offer(**facts)
        handle = bytes.fromhex(offer.handle)
    except (ValueError, TypeError, KeyError) as error:
        raise FormatError(f"what came is no offer of GPU memory: {error}; is this the daemon's socket?") from error
    sized = type(offer.size_bytes) is int and offer.size_bytes > 0
    if offer.kind not in get_args(Kind) or not sized or bool(handle) != (offer.kind == "ipc"):
        raise FormatError(f"an offer of GPU memory makes no sense: {offer}")
    return offer


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
