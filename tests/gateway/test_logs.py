import json
import logging

from cortex.gateway.logs import JsonFormatter, TextFormatter


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
