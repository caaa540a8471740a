"""Reads typed fields out of a request's JSON. Whatever is of the wrong type, out of its range, or unknown is a `BadField` that says so."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from kvstore.worker.http.faults import BadField

_SHOWN_LETTERS = 80  # letters of a wrong value that its error repeats


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises BadField where it is none, or has what JSON has not (NaN, numbers of thousands of digits)."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except ValueError as error:
        raise BadField("", f"the body is not JSON: {error}; send one object in UTF-8") from error
    except RecursionError as error:
        raise BadField("", "the body is nested too deep; send one flat object") from error
    if not isinstance(value, dict):
        raise BadField("", f"the body is {_kind(value)}; send one JSON object")
    return value


class Fields:
    """The fields of one object that nobody has read yet. A field that is null counts as absent, as in OpenAI's interface."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self._where = where

    def path(self, name: str) -> str:
        """The name by which errors call a field."""
        return f"{self._where}{name}"

    def raw(self, name: str) -> Any:
        """The value as it is; None where it is absent."""
        return self._left.pop(name, None)

    def text(self, name: str, default: str | None = None) -> str | None:
        """A text."""
        value = self.raw(name)
        if value is None:
            return default
        return value if isinstance(value, str) else self.wrong(name, value, "a text")

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.raw(name)
        if value is None:
            return default
        return value if isinstance(value, bool) else self.wrong(name, value, "true or false")

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.wrong(name, value, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return number if math.isfinite(number) else self.wrong(name, value, "a number that a float can hold")

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.wrong(name, value, "a whole number")
        return value if low <= value <= high else self.wrong(name, value, f"a whole number from {low} to {high}")

    def inner(self, name: str) -> "Fields":
        """The fields of an object in this one; none where it is absent."""
        value = self.raw(name)
        if value is None:
            return Fields({}, f"{self.path(name)}.")
        return Fields(value, f"{self.path(name)}.") if isinstance(value, dict) else self.wrong(name, value, "an object")

    def ignore(self, names: Collection[str]) -> None:
        """Fields that change nothing in an answer."""
        for name in names:
            self._left.pop(name, None)

    def only_neutral(self, neutral: Mapping[str, Sequence[Any]]) -> None:
        """Fields for something that is not served, by name: refused unless they have a value that does not ask for it."""
        for name, fine in neutral.items():
            value = self.raw(name)
            if value is not None and not any(value == each and type(value) is type(each) for each in fine):
                raise BadField(self.path(name), f"{self.path(name)} is not served here; leave it out", "unsupported_parameter")

    def end(self) -> None:
        """Refuses what nobody has read: a field that is not understood might have changed the answer."""
        for name in self._left:
            full = self.path(name)[:_SHOWN_LETTERS]
            raise BadField(full, f"unknown field {full!r}; leave it out", "unknown_parameter")

    def wrong(self, name: str, value: object, wanted: str) -> NoReturn:
        """Refuse a value."""
        raise BadField(self.path(name), f"{self.path(name)} is {_kind(value)}; give {wanted}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    try:
        shown = json.dumps(value)
    except ValueError:  # an integer of more digits than Python writes
        shown = "a number of thousands of digits"
    return shown if len(shown) <= _SHOWN_LETTERS else shown[:_SHOWN_LETTERS] + "…"
