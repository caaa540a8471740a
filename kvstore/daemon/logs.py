"""Log lines: one a record, for people or as JSON, with the keys that the code gave in `extra`."""

from __future__ import annotations

import json
import logging
import sys
import time

from kvstore.config import LogSettings
from kvstore.daemon.log_output import LogOutput

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up(settings: LogSettings) -> None:
    """Write to standard error from now on; where it takes no more, lines are dropped rather than waited for."""
    handler: logging.Handler = logging.NullHandler()  # where standard error is closed: its number may be another file's by now
    if sys.stderr is not None:
        sys.stderr.flush()
        handler = LogOutput(sys.stderr.fileno())
    handler.setFormatter(JsonLines() if settings.format == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())


def flush() -> None:
    """Write the lines that standard error did not take at first, as far as it takes them now."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def extras(record: logging.LogRecord) -> dict[str, object]:
    """What the code gave beside the text; empty values are left out."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD and value not in ("", None, 0)}


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "text": record.getMessage(),
            **extras(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """For people: time, level, text, key=value."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        keys = "".join(f" {key}={value}" for key, value in extras(record).items())
        line = f"{_utc(record.created)} {record.levelname:<7} {_one_line(record.getMessage() + keys)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _one_line(text: str) -> str:
    """Line ends and other control characters as escapes: clients choose some of the words, and must not write lines of their own."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"
