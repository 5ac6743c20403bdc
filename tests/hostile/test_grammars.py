"""Constraints on the output that cannot be read or followed: 400, with the field that the client used."""

from __future__ import annotations

import json
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
GRAMMAR_FIELDS = ("grammar", "ebnf", "guided_grammar", "structured_outputs.grammar")
GRAMMARS = [
    ("root ::= this is (not valid", "line 1, column 28"),
    ("root ::= [a-z", "line 1, column 14"),
    ('root ::= "a"\n  | missing', "line 2, column 5"),
    ("root ::= root", "line 1, column 1"),
    ("garbage (", "line 1, column 1"),
    ("root ::= " + "(" * 50_000, "nested"),
    ('root ::= "a"{99999999999}', "line 1, column 13"),
    ('start: "a" missing', "line 1, column"),
    ('start: "a" (', "line 1"),
    ("start: /[a/", "line 1, column 8"),
    ("start: start", "no text satisfies it"),
    ("start: /[^\\x00-\\x{10FFFF}]/", "no text satisfies it"),
    ('start: "a" <[99999999]>', "line 1, column"),
    ("start: " + '"a" /b/? ' * 30_000, "too large"),
    ("start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"', "too big"),
]


def body_of(field: str, value: Any) -> dict[str, Any]:
    outer, _, inner = field.partition(".")
    turn = {"role": "user", "content": "hi"}
    return {"model": "org/tiny", "messages": [turn], "max_tokens": 3, outer: {inner: value} if inner else value}


async def rejection(api: Any, field: str, value: Any, **more: Any) -> dict[str, Any]:
    sent = json.dumps(body_of(field, value) | more)
    async with api.client.post(api.url + CHAT, data=sent) as response:
        reply = json.loads(await response.read())
    assert response.status == 400, reply
    error: dict[str, Any] = reply["error"]
    assert error["param"] == field, error
    assert len(error["message"]) < 600
    return error


@pytest.mark.parametrize(("grammar", "word"), GRAMMARS, ids=range(len(GRAMMARS)))
async def test_invalid_grammar_is_rejected_with_its_place(api: Any, grammar: str, word: str) -> None:
    error = await rejection(api, "grammar", grammar)
    assert word in error["message"], error


@pytest.mark.parametrize("field", GRAMMAR_FIELDS)
async def test_rejection_names_the_field_that_the_client_used(api: Any, field: str) -> None:
    for grammar, place in GRAMMARS[:4]:
        error = await rejection(api, field, grammar)
        assert f"'{field}'" in error["message"]
        assert place in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_regex", "[a"),
        ("regex", "(?=a)b"),
        ("structured_outputs.regex", r"[^\x00-\x{10FFFF}]"),
        ("guided_regex", "(" * 10_000),
        ("guided_json", {"type": "objekt"}),
        ("json_schema", {"type": "string", "minLength": 5, "maxLength": 3}),
        ("guided_json", False),
        ("structured_outputs.json", {"$ref": "#/$defs/missing"}),
        ("guided_json", {"type": "string", "pattern": "["}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": ["?"]}}}),
    ],
)
async def test_other_constraints_are_rejected_the_same_way(api: Any, field: str, value: Any) -> None:
    await rejection(api, field, value)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    await rejection(api, field, value, tools=[tool])


@pytest.mark.parametrize("grammar", ['root ::= ("a"*)*', 'start ::= "x"\nroot ::= start+', 'start: "a"'])
async def test_valid_grammars_are_served(api: Any, grammar: str) -> None:
    async with api.client.post(api.url + CHAT, data=json.dumps(body_of("grammar", grammar))) as response:
        assert response.status == 200, await response.text()


async def test_half_of_a_surrogate_pair_in_a_constraint_is_no_server_error(api: Any) -> None:
    for field, value in [
        ("guided_choice", ["\ud800"]),
        ("guided_regex", "\ud800"),
        ("guided_json", {"enum": ["\ud800"]}),
    ]:
        async with api.client.post(api.url + CHAT, data=json.dumps(body_of(field, value))) as response:
            assert response.status < 500, await response.text()
