from __future__ import annotations

import json
import logging
import re

import pytest

from cortex.telemetry import logs
from cortex.telemetry.logs import JsonFormatter, TextFormatter


def record(**extra: object) -> logging.LogRecord:
    return logging.getLogger("cortex.test").makeRecord(
        "cortex.test", logging.INFO, __file__, 1, "loaded %s", ("a/b",), None, extra=extra
    )


def test_json_line_has_the_extra_fields_of_the_event() -> None:
    line = json.loads(JsonFormatter().format(record(node="beast", request_id="req_1", for_model=None)))
    assert line["message"] == "loaded a/b"
    assert line["level"] == "info"
    assert (line["node"], line["request_id"]) == ("beast", "req_1")
    assert "for_model" not in line, "a field without a value says nothing"


def test_client_text_cannot_forge_a_log_line() -> None:
    forged = "x\n2026-01-01 00:00:00 INFO    forged\x1b[2J\u2028\x85"
    problem = ValueError(forged)
    event = logging.makeLogRecord({"msg": "GET %s", "args": (forged,), "field": forged})
    event.exc_info = (ValueError, problem, None)
    first, *rest = TextFormatter().format(event).splitlines()
    assert "forged\\x1b[2J\\u2028\\x85" in first
    assert first.count("forged") == 2
    assert all(line.startswith("    ") for line in rest)
    assert "\n" not in JsonFormatter().format(event)


def test_bytes_that_are_not_text_do_not_stop_the_log() -> None:
    event = logging.makeLogRecord({"msg": "GET %s", "args": ("/\udcff",), "field": "\udc80", "count": 3})
    assert json.loads(JsonFormatter().format(event))["message"] == r"GET /\udcff"
    assert TextFormatter().format(event).encode()


def test_text_line_has_date_time_level_message_and_fields() -> None:
    line = TextFormatter().format(record(node="beast", for_model=None))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    loaded a/b  node=beast", line)


@pytest.mark.usefixtures("restored_logging")
def test_lines_of_every_logger_have_the_common_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json", "info", lambda: {"device": "cpu"})
    logging.getLogger("cortex.some.module").info("loaded", extra={"model": "a"})
    logging.getLogger("cortex.some.module").debug("below the level")
    logging.getLogger("a.library").warning("careful")
    logging.getLogger("a.library").info("below the level")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["message"], line["device"]) for line in lines] == [("loaded", "cpu"), ("careful", "cpu")]


@pytest.mark.usefixtures("restored_logging")
def test_configuring_again_replaces_only_our_own_handler(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logs.configure("json", "info")
    assert logs.in_use() == ("json", "INFO")
    logs.configure("text", "warning")
    assert logs.in_use() == ("text", "WARNING")
    logging.getLogger("cortex.some.module").warning("once")
    assert capsys.readouterr().err.count("once") == 1
    assert "once" in caplog.text


@pytest.mark.usefixtures("restored_logging")
def test_held_lines_are_written_in_the_configured_format_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    logs.hold()
    logging.getLogger("cortex.settings").warning("old name", extra={"key": "models_config"})
    logging.getLogger("library").info("chatter")
    assert capsys.readouterr().err == ""
    logs.configure("json", "info")
    logging.getLogger("cortex.gateway").info("listening")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["message"], line.get("key")) for line in lines] == [
        ("old name", "models_config"),
        ("listening", None),
    ]
