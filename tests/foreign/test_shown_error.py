"""What clients see of the errors of foreign servers."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from cortex.foreign.shown_error import MAX_TEXT, shown_error, shown_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://help.example.com/x?key=1 for more", "see … for more"),
        ("cannot reach 10.1.2.3:8000 or localhost:11434 or gpu-7.lab.internal:443/v1", "cannot reach … or … or …"),
        ("upstream [::1]:8000, fe80:0:0:1::2", "upstream …, …"),
        ("in organization org-AbCdEfGh on tokens", "in organization … on tokens"),
        ("key sk-proj-abc123def456 of ops@lab.example", "key … of …"),
        ("failed (request id: 3f2a-77)", "failed (…)"),
        ("call 0f8fad5b-d9cb-469f-a165-70867728950e failed", "call … failed"),
        ("cannot read /srv/models/llama/config.json", "cannot read …"),
        ("account 123456789 is not allowed", "… is not allowed"),
        ("`max_completion_tokens` must be at most 4096", "`max_completion_tokens` must be at most 4096"),
        ("messages.0.content: Input should be a valid string", "messages.0.content: Input should be a valid string"),
        ("messages[3].tool_calls[0].function.arguments is no JSON", None),
        ("Invalid schema for response_format 'x': at /properties, 'additionalProperties' is required", None),
        ("temperature: 2.5 is not in 0.0..2.0", None),
        ("tool_choice: {'type': 'function'} has no name at 12:30", None),
        ("unsupported parameter: 'frequency_penalty' (see the docs)", None),
        ("line one\n\tline two", "line one line two"),
    ],
)
def test_text_keeps_what_is_about_the_request(text: str, shown: str | None) -> None:
    assert shown_text(text, "model-a", "model-a") == (text if shown is None else shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("The model `org/Big-9B` does not support tools", "The model `fast` does not support tools"),
        ("org/big-9b-2024-08 has 8192", "fast has 8192"),
        ("big-9b is not org/big-9b.", "big-9b is not fast."),
        ("neither org/big-9b nor other is here, another is", "neither fast nor … is here, another is"),
    ],
)
def test_text_names_only_the_model_of_the_client(text: str, shown: str) -> None:
    assert shown_text(text, "org/big-9b", "fast", ("other",)) == shown


def test_cost_of_a_text_is_that_of_the_models_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may have thousands of others, and the loop that relays for all clients waits."""
    num_searched, search = 0, re.sub

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal num_searched
        num_searched += 1
        return str(search(*given, **named))

    monkeypatch.setattr(re, "sub", counted)
    others = [f"org/model-{number}" for number in range(1000)]
    assert shown_text("try Org/Model-7 instead of m", "m", "fast", others) == "try … instead of fast"
    assert num_searched == 2


def test_text_is_bounded() -> None:
    assert len(shown_text("a " * 1_000_000, "m", "n" * 50)) <= MAX_TEXT
    assert len(shown_text("m " * 1000, "m", "n" * 500)) <= MAX_TEXT


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            400,
            {"error": {"message": "bad", "code": "invalid_value", "param": "n"}},
            ("invalid_value", "bad", "n"),
        ),
        (400, {"error": {"message": "maximum context length is 9"}}, ("context_length_exceeded", None, None)),
        (
            400,
            {"error": {"message": "no", "type": "exceed_context_size_error"}},
            ("context_length_exceeded", "no", None),
        ),
        (400, {"object": "error", "message": "bad", "param": None, "code": 400}, ("invalid_value", "bad", None)),
        (400, {"error": "text"}, ("invalid_value", "text", None)),
        (422, {"detail": "text"}, ("invalid_value", "text", None)),
        (422, {"detail": [{"loc": ["body", "n"], "msg": "too big"}]}, ("invalid_value", "too big", "n")),
        (413, {"error": {"message": "long", "code": "internal_error"}}, ("body_too_large", "long", None)),
        (400, {"error": {"message": "no", "code": "insufficient_quota"}}, ("invalid_value", "no", None)),
        (400, {"error": {"message": "no", "code": "model_not_found"}}, ("invalid_value", "no", None)),
        (400, {"error": {"message": "no", "param": "http://10.0.0.1/ x"}}, ("invalid_value", "no", None)),
        (400, [1], ("invalid_value", None, None)),
    ],
)
def test_error_has_a_kind_that_fits_its_status(
    status: int, body: object, expected: tuple[str, str | None, str | None]
) -> None:
    error = shown_error(status, msgspec.json.encode(body), "m", "m")
    assert (error.code, error.param) == (expected[0], expected[2])
    assert expected[1] in (None, error.message)
    assert error.message
    assert error.status == (413 if status == 413 else 400)


@pytest.mark.parametrize("body", [b"", b"<html>10.0.0.7</html>", b"[" * 100_000, b"\xff", b'"x"'])
def test_error_that_is_not_json_has_a_text(body: bytes) -> None:
    assert shown_error(400, body, "m", "m").message in ("The model's server rejects the request.", "x")
