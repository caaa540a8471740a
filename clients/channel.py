"""Where the daemon is, how its channel is set up, and its statuses as the store's errors."""

from __future__ import annotations

import os

import grpc

from kvstore import config, errors

MAX_MESSAGE_BYTES = 4 * 2**20  # 4 MiB: a batch's 8,192 blocks with hashes, parents and token ids are under 2
KEEPALIVE_MS = 10_000  # a ping this often is the sign of life of both sides; grpc answers them in C
PING_TIMEOUT_MS = 20_000  # with the interval 30 s: a silent side is given up then
MAP_AGAIN_S = 30.0  # after shared memory could not be mapped it is tried again so late: what was in the way may be gone
CALL_TIMEOUT_S = 10.0  # for calls that only ask; none takes more than milliseconds

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),  # a restarted daemon is found soon: it is on this machine, and a try is cheap
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),  # below the pauses of steps.persistent, so that a retry does try
    ("grpc.enable_http_proxy", 0),
)


def target(address: str | os.PathLike[str] | None) -> str:
    """What grpc connects to. `address` a socket's path (as `config.socket_path` takes it), or host:port.

    None takes KVSTORE_LISTEN, then `listen` in the file that KVSTORE_CONFIG names, then the daemon's default. Raises ConfigError.
    """
    place = os.fspath(address) if address else config.configured_listen(os.environ)
    path = config.socket_path(place)
    return f"unix:{path}" if path else place


def error_of(error: grpc.RpcError, place: str) -> errors.KVStoreError:
    """The store's error for a failed call to `place`."""
    code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else grpc.StatusCode.UNKNOWN
    text = (error.details() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None) or ""
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED) and not text.startswith("Unavailable: "):
        why = text.rpartition("error: ")[2] or "connection lost"  # grpc's own texts end with the system's reason
        return errors.Unavailable(f"daemon at {place}: {why}; is `kvstore serve` running there?")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.Unavailable(f"{place} answers, but is no kvstore daemon of this version ({text}); give the address of one")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in text:  # grpc's own words; the same message never passes
        return errors.LimitExceeded(f"daemon at {place}: {text.partition(': ')[2] or text} bytes; send less in one call")
    return errors.from_code(code.name, text)
