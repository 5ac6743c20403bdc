"""Errors of the API, and what clients that are not operators see of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.wire import errors
from cortex.wire.dialects.registry import DIALECTS, FAMILIES
from cortex.wire.error_encoding import OPENAI, Family, from_code, public
from cortex.wire.errors import MAX_ECHO, MAX_MESSAGE, CortexError, InvalidValue, shorten
from cortex.wire.node import headers
from cortex.wire.words import about

LONG = "z" * 50_000


@pytest.mark.parametrize(
    "error",
    [
        errors.LoadFailed,
        errors.HubUnavailable,
        errors.SourceNotFound,
        errors.FilesDamaged,
        errors.DiskFull,
        errors.ModelNotFound,
    ],
)
def test_reasons_of_failed_loads_are_for_operators(error: type[CortexError]) -> None:
    shown = public(error("/srv/models/secret.gguf is corrupt on beast"))
    assert "secret" not in shown.message
    assert type(shown) is error


@pytest.mark.parametrize(
    "error", [errors.OperatorOnly, errors.InvalidValue, errors.RateLimitExceeded, errors.ContextLengthExceeded]
)
def test_error_about_the_request_itself_keeps_its_words(error: type[CortexError]) -> None:
    given = error("what is wrong with the request")
    assert public(given) is given


def test_message_with_bytes_that_are_not_text_can_be_encoded() -> None:
    error = InvalidValue("no \udcff here: é", param="a\udc80")
    assert (error.message, error.param) == ("no ? here: é", "a?")
    for family in FAMILIES:
        assert msgspec.json.encode(family.envelope(error))


def test_shortens_only_long_text() -> None:
    assert shorten("a" * MAX_ECHO) == "a" * MAX_ECHO
    assert shorten("a" * (MAX_ECHO + 1)) == "a" * (MAX_ECHO - 1) + "…"


@pytest.mark.parametrize("family", FAMILIES)
def test_message_is_never_longer_than_the_limit(family: Family) -> None:
    body = family.envelope(InvalidValue(LONG, param=LONG))
    error = body["error"] if isinstance(body["error"], dict) else {"message": body["error"]}
    assert len(error["message"]) == MAX_MESSAGE
    assert len(error.get("param") or "") <= MAX_ECHO


HOSTILE: list[dict[str, Any]] = [
    {"model": LONG},
    {"logit_bias": {LONG: 1}},
    {"response_format": {"type": LONG}},
    {"text": {"format": {"type": LONG}}},
    {"output_format": {"type": LONG}},
    {"tool_choice": LONG},
    {"tool_choice": {"type": "tool", "name": LONG}},
    {"tool_choice": {"type": "function", "function": {"name": LONG}}},
    {"tool_choice": {"type": LONG}},
    {"messages": [{"role": "user", "content": [{"type": LONG}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": LONG}}]}]},
    {"input": [{"role": "user", "content": [{"type": LONG}]}]},
    {"guided_json": LONG},
    {"format": LONG},
    {"think": LONG},
]


def rejection(dialect: str, fields: dict[str, Any]) -> CortexError | None:
    """The error of a dialect for a body with `fields`; None when it accepts them."""
    turn = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {
        "model": "m",
        "messages": turn,
        "input": turn,
        "max_tokens": 5,
        "tools": [{"name": "f"}],
        **fields,
    }
    if dialect == "openai_completions":
        body["prompt"] = "hi"
    try:
        DIALECTS[dialect].parse(msgspec.json.encode(body))
    except CortexError as error:
        return error
    return None


@pytest.mark.parametrize("dialect", DIALECTS)
def test_errors_repeat_little_of_the_request_in_every_dialect(dialect: str) -> None:
    found = [error for fields in HOSTILE if (error := rejection(dialect, fields)) is not None]
    assert len(found) >= 2
    for error in found:
        assert error.message.count("z") <= MAX_ECHO
        assert (error.param or "").count("z") <= MAX_ECHO


def test_header_repeats_little_of_the_request() -> None:
    assert len(headers.listed([LONG, "web_search"])) == MAX_ECHO


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("code", ["unsupported_modality", "template_render_failed", "context_length_exceeded"])
def test_what_a_model_cannot_do_is_a_bad_request(family: Family, code: str) -> None:
    error = from_code(code, "no images")
    assert family.status(error) == 400
    body = family.envelope(error)
    assert body == {"error": "no images", "code": code} or body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("subject", "problem", "message"),
    [
        ("org/m", "org/m is not in the cache", "org/m is not in the cache"),
        ("org/m", "org/m: too large", "org/m: too large"),
        ("org/m", "org/model is gated", "org/m: org/model is gated"),
        ("small", OSError("no space"), "small: no space"),
        ("small", PermissionError(13, "Permission denied", "/hub/m"), "small: /hub/m: Permission denied"),
        ("/hub/m", PermissionError(13, "Permission denied", "/hub/m"), "/hub/m: Permission denied"),
    ],
)
def test_message_names_its_subject_once(subject: str, problem: object, message: str) -> None:
    assert about(subject, problem) == message


def test_message_is_first_and_no_detail_replaces_it() -> None:
    error = InvalidValue("wrong", details={"nodes": [{"node": "beast"}], "message": "other"})
    body = OPENAI.envelope(error)["error"]
    assert list(body) == ["message", "type", "code", "param", "nodes"]
    assert body["message"] == "wrong"
