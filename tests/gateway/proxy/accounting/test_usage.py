import json

import pytest

from cortex.gateway.proxy.request import usage_in_dialect
from cortex.wire.events import Usage


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (
            b'"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,'
            b'"prompt_tokens_details":{"cached_tokens":4}}}',
            Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=3),
        ),
        (
            b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,'
            b'"completion_tokens_details":{"reasoning_tokens":2}}}\n\ndata: [DONE]\n\n',
            Usage(prompt_tokens=7, completion_tokens=3, reasoning_tokens=2),
        ),
        (
            b'data: {"type":"message_delta","usage":{"input_tokens":2,'
            b'"cache_read_input_tokens":5,"output_tokens":9}}\n\ndata: {"type":"message_stop"}\n\n',
            Usage(prompt_tokens=7, cached_tokens=5, completion_tokens=9),
        ),
        (
            b'"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\ndata: {"choices":[],"usage":null}\n\n',
            Usage(prompt_tokens=7, completion_tokens=3),
        ),
        (b'"usage": {"input_tokens": 3, "output_tokens": 4}}', Usage(prompt_tokens=3, completion_tokens=4)),
        (b"", None),
        (b'data: {"choices":[]}\n\ndata: [DONE]\n\n', None),
        (b'"usage":{"prompt_tok', None),
    ],
)
def test_reads_usage_at_the_end_of_any_dialect(tail: bytes, usage: Usage | None) -> None:
    assert usage_in_dialect(tail) == usage


def test_ignores_usage_in_generated_text() -> None:
    text = json.dumps({"choices": [{"delta": {"content": '"usage":{"prompt_tokens":0}'}}]})
    assert usage_in_dialect(b"data: " + text.encode() + b"\n\n") is None


@pytest.mark.parametrize(
    "report",
    [
        b'{"prompt_tokens":10000000000000000000000000,"completion_tokens":3}',
        b'{"prompt_tokens":5,"completion_tokens":4294967296}',
        b'{"prompt_tokens":-5,"completion_tokens":3}',
        b'{"prompt_tokens":5,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":1e30}}',
        b'{"input_tokens":2147483647,"cache_read_input_tokens":2147483647,"output_tokens":1}',
        b'{"prompt_tokens":0,"completion_tokens":0}',
    ],
)
def test_rejects_numbers_that_no_response_can_have(report: bytes) -> None:
    assert usage_in_dialect(b'{"usage":' + report + b"}") is None
