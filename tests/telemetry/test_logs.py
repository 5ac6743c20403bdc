import json
import logging

import pytest

from cortex.telemetry import logs
from cortex.telemetry.logs import JsonFormatter, TextFormatter


@pytest.fixture
def restored():
    root, ours = logging.getLogger(), logging.getLogger("cortex")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def record(**extra):
    return logging.getLogger("cortex.test").makeRecord(
        "cortex.test", logging.INFO, __file__, 1, "loaded %s", ("a/b",), None, extra=extra
    )


def test_json_lines_carry_the_fields_of_the_event():
    line = json.loads(JsonFormatter().format(record(node="beast", request_id="req_1")))
    assert line["message"] == "loaded a/b"
    assert line["level"] == "info"
    assert (line["node"], line["request_id"]) == ("beast", "req_1")


def test_text_lines_append_the_fields():
    assert TextFormatter().format(record(node="beast")).endswith("loaded a/b  node=beast")


def test_every_line_is_json_with_the_common_fields_whoever_logs_it(restored, capsys):
    logs.configure("json", "info", lambda: {"device": "cpu"})
    logging.getLogger("cortex.some.room").info("loaded", extra={"model": "a"})
    logging.getLogger("cortex.some.room").debug("not told")
    logging.getLogger("a.library").warning("careful")
    logging.getLogger("a.library").info("not told")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["message"], line["device"]) for line in lines] == [("loaded", "cpu"), ("careful", "cpu")]


def test_configuring_again_replaces_the_format_and_keeps_strangers_handlers(restored, capsys, caplog):
    logs.configure("json", "info")
    assert logs.in_use() == ("json", "INFO")
    logs.configure("text", "warning")
    assert logs.in_use() == ("text", "WARNING")
    logging.getLogger("cortex.some.room").warning("once")
    assert capsys.readouterr().err.count("once") == 1
    assert "once" in caplog.text
