"""Errors as OpenAI's clients understand them: a status, and a JSON object that says what, which field, and which kind."""

from typing import Any

from kvstore.errors import (
    CallerError,
    DeadlineExceeded,
    InvalidArgument,
    KVStoreError,
    LimitExceeded,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    SessionEnded,
    Unavailable,
)

RETRY_AFTER_S = 1  # seconds: about what a place in the queue takes to come free; clients add a wait of their own that grows
_TOO_LARGE = 413  # status: the body is past the limit


class BadField(InvalidArgument):
    """A field of the request is wrong: `param` names it, `word` is OpenAI's code for how, where there is one."""

    def __init__(self, param: str, text: str, word: str | None = None) -> None:
        super().__init__(text.encode(errors="replace").decode())  # a field may be named with half a surrogate pair
        self.param, self.word = param.encode(errors="replace").decode(), word


class TooLong(LimitExceeded):
    """The prompt in this field and its answer are longer than the model takes."""

    word = "context_length_exceeded"

    def __init__(self, param: str, text: str) -> None:
        super().__init__(text)
        self.param = param


class TooLarge(LimitExceeded):
    """The request's body is past the limit."""


class NoSuchModel(NotFound):
    """The request names a model that is not served here."""

    param, word = "model", "model_not_found"


def status_of(error: KVStoreError) -> int:
    """The HTTP status of a fault."""
    by_kind: tuple[tuple[type[KVStoreError], int], ...] = (
        (TooLarge, _TOO_LARGE),
        (NotFound, 404),
        (PermissionDenied, 401),
        (SessionEnded, 503),
        (CallerError, 400),
        (ResourceExhausted, 429),
        (Unavailable, 503),
        (DeadlineExceeded, 503),
    )
    return next((status for kind, status in by_kind if isinstance(error, kind)), 500)


def headers_of(error: KVStoreError) -> dict[str, str]:
    """When to come again, where that may help."""
    return {"Retry-After": str(RETRY_AFTER_S)} if status_of(error) in (429, 503) else {}


def body_of(error: KVStoreError) -> dict[str, Any]:
    """The error's JSON."""
    status = status_of(error)
    kinds = {401: "authentication_error", 429: "rate_limit_error", 503: "server_error", 500: "server_error"}
    codes = {401: "invalid_api_key", 429: "rate_limit_exceeded", 503: "unavailable", _TOO_LARGE: "request_too_large"}
    known = error if isinstance(error, (BadField, TooLong, NoSuchModel)) else None
    fault = {
        "message": str(error),
        "type": kinds.get(status, "invalid_request_error"),
        "param": known.param or None if known else None,
        "code": known.word if known else codes.get(status),
    }
    return {"error": fault}
