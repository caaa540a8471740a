"""What can go wrong, sorted by whose fault it is: the caller's, the environment's, or ours.

Each class carries the name of the gRPC status it travels as, and whether the same request may succeed later unchanged.
`from_code` is the one way back from a status to an exception. A text says what happened, to what, and what to do.
"""

from typing import ClassVar

MAX_TEXT_BYTES = 2000  # bytes of a status text: escaped it may be three times as long, and grpc drops headers from 8 KiB on
TAIL_BYTES = 500  # bytes kept of a long one's end, which says what to do


class KVStoreError(Exception):
    """The root: catch this to catch every fault that the store reports."""

    code: ClassVar[str] = "UNKNOWN"
    retryable: ClassVar[bool] = False


class CallerError(KVStoreError):
    """The request is at fault: repeating it unchanged fails again."""

    code = "INVALID_ARGUMENT"


class InvalidArgument(CallerError):
    """A value in the request is outside what it may be."""


class GeometryError(InvalidArgument):
    """The numbers do not describe a block layout."""


class NotFound(CallerError):
    """The named thing is not here."""

    code = "NOT_FOUND"


class SessionEnded(CallerError):
    """The session is over: attach again."""

    code = "FAILED_PRECONDITION"


class StaleEpoch(CallerError):
    """The request belongs to an earlier run of the daemon: attach again."""

    code = "FAILED_PRECONDITION"


class LimitExceeded(CallerError):
    """A named limit was passed; the text names it and gives both numbers."""

    code = "OUT_OF_RANGE"


class PermissionDenied(CallerError):
    """The caller may not see or do this."""

    code = "PERMISSION_DENIED"


class EnvironmentFault(KVStoreError):
    """The machine, its memory, a disk or a network is at fault."""

    code = "UNAVAILABLE"


class ResourceExhausted(EnvironmentFault):
    """Nothing is free now; something may be later."""

    code = "RESOURCE_EXHAUSTED"
    retryable = True


class Unavailable(EnvironmentFault):
    """The other side cannot be reached now."""

    code = "UNAVAILABLE"
    retryable = True


class DeadlineExceeded(EnvironmentFault):
    """The answer did not come in time."""

    code = "DEADLINE_EXCEEDED"
    retryable = True


class Corruption(EnvironmentFault):
    """Bytes came back other than they were written."""

    code = "DATA_LOSS"


class ConfigError(EnvironmentFault):
    """A setting is wrong, or the machine has less than the settings ask for."""

    code = "FAILED_PRECONDITION"


class FormatError(EnvironmentFault):
    """What lies on disk or in shared memory is not in a format that this version reads."""

    code = "FAILED_PRECONDITION"


class InternalFault(KVStoreError):
    """The store broke one of its own rules: a bug, please report it."""

    code = "INTERNAL"


# Where several classes share a status, the one that says the least beyond it.
_BY_CODE: dict[str, type[KVStoreError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "NOT_FOUND": NotFound,
    "FAILED_PRECONDITION": SessionEnded,
    "OUT_OF_RANGE": LimitExceeded,
    "PERMISSION_DENIED": PermissionDenied,
    "UNAUTHENTICATED": PermissionDenied,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "UNAVAILABLE": Unavailable,
    "CANCELLED": Unavailable,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "DATA_LOSS": Corruption,
    "INTERNAL": InternalFault,
}


def from_code(name: str, text: str) -> KVStoreError:
    """The exception for a status by its gRPC name ("NOT_FOUND"); a name that the store never sends gives the root class.

    A status text that begins with a class name and a colon ("StaleEpoch: ...") gives that class: several share a status.
    """
    head, _, rest = text.partition(": ")
    for kind in _all_kinds(KVStoreError):
        if kind.__name__ == head and kind.code == name:
            return kind(rest)
    return _BY_CODE.get(name, KVStoreError)(text)


def to_text(error: KVStoreError) -> str:
    """The status text that `from_code` turns into the same class again. What a text quotes may be long: then its middle is left out."""
    text = f"{type(error).__name__}: {error}".encode(errors="replace")
    if len(text) > MAX_TEXT_BYTES:
        text = text[: MAX_TEXT_BYTES - TAIL_BYTES] + b" [...] " + text[-TAIL_BYTES:]
    return text.decode(errors="ignore")


def _all_kinds(root: type[KVStoreError]) -> list[type[KVStoreError]]:
    kinds = [root]
    for child in root.__subclasses__():
        kinds.extend(_all_kinds(child))
    return kinds
