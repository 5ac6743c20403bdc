"""The billing line is removed from system prompts, in whatever form they have, and nowhere else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.anthropic_messages import strip_billing_header

LINE = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch=3f1c2;"}
PROMPT = {"type": "text", "text": "You are terse.", "cache_control": {"type": "ephemeral"}}

HI = {"role": "user", "content": "hi"}


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", **fields})


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"system": [LINE, PROMPT]}, {"system": [PROMPT]}),
        ({"system": [LINE]}, {}),
        (
            {"messages": [{"role": "system", "content": [LINE, PROMPT]}, {"role": "user", "content": "hi"}]},
            {"messages": [{"role": "system", "content": [PROMPT]}, {"role": "user", "content": "hi"}]},
        ),
        (
            {"system": [LINE], "messages": [{"role": "system", "content": [LINE]}, {"role": "user", "content": "hi"}]},
            {"messages": [{"role": "user", "content": "hi"}]},
        ),
        # with other text, in a string or in a block
        ({"system": LINE["text"]}, {}),
        ({"system": f"{LINE['text']}\n\nYou are terse.\n"}, {"system": "You are terse.\n"}),
        ({"system": [{**PROMPT, "text": f"{LINE['text']}\nYou are terse."}]}, {"system": [PROMPT]}),
        ({"system": f"You are terse.\n{LINE['text']}\nBe kind."}, {"system": "You are terse.\nBe kind."}),
        # in chat completions
        (
            {"messages": [{"role": "system", "content": f"{LINE['text']}\nYou are terse."}, HI]},
            {"messages": [{"role": "system", "content": "You are terse."}, HI]},
        ),
        ({"messages": [{"role": "developer", "content": LINE["text"]}, HI]}, {"messages": [HI]}),
        # in responses
        (
            {"instructions": f"{LINE['text']}\nYou are terse.", "input": "hi"},
            {"instructions": "You are terse.", "input": "hi"},
        ),
        ({"instructions": LINE["text"], "input": [HI]}, {"input": [HI]}),
        (
            {"input": [{"role": "developer", "content": [{**LINE, "type": "input_text"}, PROMPT]}, HI]},
            {"input": [{"role": "developer", "content": [PROMPT]}, HI]},
        ),
        # with text in the same line, which is no part of it
        ({"system": f"{LINE['text']} You are terse. x=1;\nBe kind."}, {"system": "You are terse. x=1;\nBe kind."}),
        ({"system": f"{LINE['text'].rstrip(';')} You are terse."}, {"system": "You are terse."}),
        ({"system": f"{LINE['text'].rstrip(';')}\r\nYou are terse."}, {"system": "You are terse."}),
        ({"system": "x-anthropic-billing-header: in another form\nYou are terse."}, {"system": "You are terse."}),
    ],
)
def test_removes_only_the_billing_line(given: dict[str, Any], left: dict[str, Any]) -> None:
    assert msgspec.json.decode(strip_billing_header(body(**given))) == {"model": "m", **left}


def test_other_values_keep_their_bytes() -> None:
    line = msgspec.json.encode(LINE)
    stripped = strip_billing_header(b'{"x": [1 ,2.50, 1e3],"system":[' + line + b',{"text":  "a"}]}')
    assert b"[1 ,2.50, 1e3]" in stripped
    assert b'{"text":  "a"}' in stripped


@pytest.mark.parametrize(
    "untouched",
    [
        body(system="about x-anthropic-billing-header: it"),
        body(system=[{"type": "text", "text": "about x-anthropic-billing-header"}]),
        body(system=[{"type": "text", "text": "x-anthropic-billing-headers: are many"}]),
        body(messages=[{"role": "user", "content": [LINE]}]),
        body(messages=[{"role": "user", "content": LINE["text"]}]),
        body(messages=[{"role": "assistant", "content": LINE["text"]}]),
        body(tools=[LINE]),
        body(input=LINE["text"]),
        body(input=[{"role": "user", "content": LINE["text"]}]),
        b'{"system": [{"text": "x-anthropic-billing-header"',
        b'"x-anthropic-billing-header"',
        body(system=[["x-anthropic-billing-header"]]),
        body(messages=["x-anthropic-billing-header"]),
        b"\xffx-anthropic-billing-header",
    ],
)
def test_body_that_mentions_the_line_or_is_malformed_is_unchanged(untouched: bytes) -> None:
    assert strip_billing_header(untouched) is untouched
