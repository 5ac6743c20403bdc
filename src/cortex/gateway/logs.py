"""How the gateway logs: one line per event, as text for people or as JSON for collectors."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Literal

import msgspec

# What every LogRecord carries by itself; anything else was passed with `extra=` and is a field of the event.
_BUILT_IN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _BUILT_IN}


class JsonFormatter(logging.Formatter):
    """One JSON object per line; `extra=` fields stand beside the message."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """`time level message field=value …`, for a terminal or a journal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name logging gives it
        line = super().formatMessage(record)
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        return f"{line}  {fields}" if fields else line


def configure(log_format: Literal["text", "json"], level: str) -> None:
    """Send the `cortex` loggers to standard error. Calling it again replaces the format and the level."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logger = logging.getLogger("cortex")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
