"""Logging of every program: one line per event on standard error, as text for people or as JSON for collectors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

# Attributes of every LogRecord. Any other attribute was passed with `extra=` and is a field of the event.
_BUILT_IN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The `extra=` fields that have a value."""
    return {name: value for name, value in vars(record).items() if name not in _BUILT_IN and value is not None}


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the message and the `extra=` fields."""

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
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except UnicodeEncodeError:  # header bytes of a client that are not UTF-8
            line = {
                name: value if isinstance(value, int | float) else _encodable(str(value))
                for name, value in line.items()
            }
            return msgspec.json.encode(line).decode()


_CONTROL_CHARACTERS = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
"""Characters that end a line, move the cursor or reverse text in a terminal, with which clients could forge log
lines."""


class TextFormatter(logging.Formatter):
    """`date time level message field=value …`, for a terminal or a journal. One line, but for indented tracebacks."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name logging gives it
        line = super().formatMessage(record)
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        return _encodable((f"{line}  {fields}" if fields else line).translate(_CONTROL_CHARACTERS))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the name logging gives it
        return "\n".join(
            f"    {line.translate(_CONTROL_CHARACTERS)}" for line in super().formatException(ei).split("\n")
        )


class _LineHandler(logging.StreamHandler[TextIO]):
    """Our own handler. `configure` finds it by its class to replace it."""

    def __init__(self, format: Format, common: Callable[[], Mapping[str, object]]) -> None:
        super().__init__(sys.stderr)
        self.format_name = format
        self._common = common
        self.setFormatter(JsonFormatter() if format == "json" else TextFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        for name, value in self._common().items():
            vars(record).setdefault(name, value)
        super().emit(record)


class _HeldLines(logging.Handler):
    """Keeps log lines until `configure`."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def hold() -> None:
    """Hold the log until `configure`: a program calls this before it reads the configuration, which has the format."""
    logging.getLogger().addHandler(_HeldLines())


def configure(format: Format, level: str, common: Callable[[], Mapping[str, object]] = dict[str, object]) -> None:
    """Send the log of this process to standard error; of libraries only warnings and errors.

    `common` returns the fields that every line has. A second call replaces the configuration of the first. Held lines
    are written now.
    """
    root = logging.getLogger()
    held = [record for handler in root.handlers if isinstance(handler, _HeldLines) for record in handler.records]
    root.handlers[:] = [handler for handler in root.handlers if not isinstance(handler, _LineHandler | _HeldLines)]
    root.addHandler(lines := _LineHandler(format, common))
    root.setLevel(logging.WARNING)
    logging.getLogger("cortex").setLevel(level.upper())
    for record in held:
        if logging.getLogger(record.name).isEnabledFor(record.levelno):
            lines.handle(record)


def in_use() -> tuple[Format, str]:
    """Format and level of this process, for a child that must log the same way."""
    formats = [handler.format_name for handler in logging.getLogger().handlers if isinstance(handler, _LineHandler)]
    level = logging.getLevelName(logging.getLogger("cortex").getEffectiveLevel())
    return (formats[0] if formats else "text"), level
