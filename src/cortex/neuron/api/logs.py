"""The node's log: one line per event, each with the id of the request it belongs to."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from typing import Literal

import msgspec

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The id of the request that the running task serves."""


class TextLines(logging.Formatter):
    """For people: time, level, request id, message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(request_id)s %(name)s: %(message)s")


class JSONLines(logging.Formatter):
    """For collectors: one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "at_s": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": getattr(record, "request_id", "-"),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


def _with_request_id(record: logging.LogRecord) -> bool:
    record.request_id = request_id.get()
    return True


def configure(level: Literal["debug", "info", "warning", "error"], format: Literal["text", "json"]) -> None:
    """Sends the log of this process to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines() if format == "json" else TextLines())
    handler.addFilter(_with_request_id)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
