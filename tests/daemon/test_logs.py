"""What a log line looks like, whatever is in it."""

from __future__ import annotations

import json
import logging

import pytest

from kvstore.daemon.logs import JsonLines, TextLines

FORGED = "me\n2026-01-01T00:00:00.000Z ERROR   all is lost\r\x1b[2J\u2028\u202e"


def record(text: str, **extra: object) -> logging.LogRecord:
    return logging.getLogger("test").makeRecord("test", logging.INFO, "here", 1, text, (), None, extra=extra)


@pytest.mark.parametrize("where", ["text", "key"])
def test_a_client_cannot_write_lines_of_its_own(where: str) -> None:
    made = record(FORGED) if where == "text" else record("session 1 attached", client=FORGED)
    line = TextLines().format(made)
    assert line.isprintable()
    assert "me\\n2026" in line
    words = json.loads(JsonLines().format(made))
    assert FORGED in (words["text"], words.get("client"))


def test_what_is_printable_stays_as_it_is() -> None:
    assert TextLines().format(record("größer als 4 KiB", client="日本")).endswith("INFO    größer als 4 KiB client=日本")
