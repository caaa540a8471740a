"""Bytes for the daemon's socket that are no gRPC, and mostly no HTTP/2 either."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # an empty frame
READ_S = 0.05  # seconds to listen for what the daemon says to it


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """An HTTP/2 frame."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def _random(chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice((1, 24, 300, 20_000)))


def _http1(chance: random.Random) -> bytes:
    return b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * chance.randint(1, 3)


def _tls(chance: random.Random) -> bytes:
    return b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + chance.randbytes(500)


def _half_a_preface(chance: random.Random) -> bytes:
    return PREFACE[: chance.randrange(len(PREFACE))]


def _random_frames(chance: random.Random) -> bytes:
    kinds = [(chance.randrange(12), chance.randrange(256), chance.randrange(4)) for _ in range(20)]
    return PREFACE + SETTINGS + b"".join(frame(*kind, chance.randbytes(chance.randrange(60))) for kind in kinds)


def _headers_without_end(chance: random.Random) -> bytes:
    return PREFACE + SETTINGS + frame(1, 0, 1, b"\0\7:method\4POST") + frame(9, 0, 1, chance.randbytes(16_000)) * 5


def _a_frame_longer_than_it_is(chance: random.Random) -> bytes:
    return PREFACE + SETTINGS + b"\xff\xff\xff\0\0\0\0\0\1" + chance.randbytes(100)


def _pings_and_resets(chance: random.Random) -> bytes:
    pings = frame(6, 0, 0, chance.randbytes(8)) * 50
    return PREFACE + SETTINGS + pings + b"".join(frame(3, 0, 2 * number + 1, bytes(4)) for number in range(50))


KINDS: tuple[Callable[[random.Random], bytes], ...] = (
    _random,
    _http1,
    _tls,
    _half_a_preface,
    _random_frames,
    _headers_without_end,
    _a_frame_longer_than_it_is,
    _pings_and_resets,
)


def throw(address: str, chance: random.Random) -> str:
    """One connection with one kind of garbage, cut at once, or after listening for a while. Answers how it ended."""
    kind = chance.choice(KINDS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(READ_S)
        try:
            connection.connect(address)
            connection.sendall(kind(chance))
            if chance.random() < 0.5:
                while connection.recv(65_536):
                    pass
        except TimeoutError:
            return "garbage kept waiting"
        except OSError:
            return "garbage cut off"
    return "garbage closed"
