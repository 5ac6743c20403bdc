"""Usage survives the way from node to gateway, and nothing else passes for it."""

import json

import pytest

from cortex.wire import sse
from cortex.wire.events import Usage
from cortex.wire.node import usage_report

USAGE = Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=3, reasoning_tokens=1)


def test_header_round_trips() -> None:
    assert usage_report.from_header(usage_report.header_value(USAGE).encode()) == USAGE


@pytest.mark.parametrize("behind", [b"", b"data: [DONE]\n\n", b": keepalive\n\n", b": failed overloaded\n"])
def test_stream_round_trips(behind: bytes) -> None:
    stream = sse.frame(b'{"choices":[]}') + usage_report.comment(USAGE) + behind
    assert usage_report.from_stream(stream) == USAGE


def test_last_report_of_a_stream_counts() -> None:
    stream = (
        b"data: 1\n\n" + usage_report.comment(Usage(prompt_tokens=7)) + b"data: 2\n\n" + usage_report.comment(USAGE)
    )
    assert usage_report.from_stream(stream) == USAGE


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"nonsense",
        b"[]",
        b'{"prompt_tokens":-1}',
        b'{"completion_tokens":4294967296}',
        b'{"prompt_tokens":1e30}',
        b'{"prompt_tok',
    ],
)
def test_rejects_what_is_not_a_report(value: bytes) -> None:
    assert usage_report.from_header(value) is None
    assert usage_report.from_stream(b"data: 1\n\n: usage " + value + b"\n\n") is None


def test_generated_text_cannot_pass_for_a_report() -> None:
    text = json.dumps({"content": '\n: usage {"prompt_tokens":0}\n\n'}).encode()
    assert usage_report.from_stream(sse.frame(text)) is None
