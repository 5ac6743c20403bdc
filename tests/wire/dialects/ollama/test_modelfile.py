"""Modelfiles, and the bodies of `/api/create`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cortex.wire.dialects.ollama.modelfile import (
    ModelfileProblem,
    as_request,
    as_text,
    foreign_markers,
    read_creation,
)
from cortex.wire.errors import CortexError

FILE = '''
# a pirate
FROM qwen3:8b
PARAMETER temperature 0.3
PARAMETER stop "<|end|>"
parameter\tstop   AI:
PARAMETER num_predict 64
PARAMETER repeat_penalty 1.2
PARAMETER num_ctx 8192
PARAMETER num_gpu 99
SYSTEM """
You are a pirate.
Say "Arr".
"""
MESSAGE user Who are you?
MESSAGE assistant """Arr,
a pirate."""
LICENSE MIT
LICENSE "more"
'''


def read(**fields: Any) -> Any:
    return read_creation(msgspec.json.encode({"model": "pirate", "from": "a", **fields}))


def test_modelfile_is_the_body_of_a_request() -> None:
    creation = read(**as_request(FILE))
    assert (creation.source, creation.context_tokens, creation.license) == ("qwen3:8b", 8192, "MIT\nmore")
    preset = creation.preset
    assert preset.default_params == {
        "temperature": 0.3,
        "stop": ["<|end|>", "AI:"],
        "max_tokens": 64,
        "repetition_penalty": 1.2,
    }
    assert preset.system == 'You are a pirate.\nSay "Arr".\n'
    assert [each["content"] for each in preset.messages] == ["Who are you?", "Arr,\na pirate."]
    assert creation.notes == ("PARAMETER num_gpu has no effect: placement and the engine decide",)


def test_text_of_a_model_is_a_modelfile_with_the_same_meaning() -> None:
    creation = read(**as_request(FILE))
    text = as_text("pirate", creation.source, creation.preset, creation.context_tokens, creation.license)
    again = read(**as_request(text))
    assert (again.preset, again.context_tokens, again.license) == (
        creation.preset,
        creation.context_tokens,
        creation.license,
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("SYSTEM x", "there is no FROM"),
        ("FROM a\nDANCE", "line 2: DANCE is not an instruction"),
        ("FROM a\nRENDERER x", "line 2: RENDERER selects a part of Ollama"),
        ('FROM a\nSYSTEM """x', 'line 2: `"""` is not closed'),
        ('FROM a\nSYSTEM """x""" y', "text after the closing"),
        ("FROM", "line 1: FROM has no value"),
    ],
)
def test_bad_modelfiles_are_rejected_with_their_line(text: str, problem: str) -> None:
    with pytest.raises(ModelfileProblem, match=problem):
        as_request(text)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"adapters": {"a": "b"}}, "ADAPTER is not supported"),
        ({"from": "", "files": {"a": "sha256:x"}}, "has no digest"),
        ({"parameters": {"mirostat": 1}}, "'mirostat' is not supported"),
        ({"parameters": {"temperature": "hot"}}, "give a number, not hot"),
        ({"parameters": {"num_ctx": 1}}, "at least 2"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"from": ""}, "Give either 'from'"),
        ({"files": {"a": f"sha256:{'0' * 64}"}}, "Give either 'from'"),
        ({"model": ""}, "Give 'model'"),
    ],
)
def test_bad_bodies_are_rejected(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(CortexError, match=problem):
        read(**fields)


def test_limits_that_mean_none_are_left_out() -> None:
    assert read(parameters={"num_predict": -1, "repeat_last_n": -1, "seed": 3}).preset.default_params == {"seed": 3}


@pytest.mark.parametrize(
    ("go_template", "expected"),
    [
        ("{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>{{ end }}", ()),
        ("<|start_header_id|>{{ .Role }}<|im_end|>", ("<|start_header_id|>",)),
        ("{{ .Prompt }}", None),
    ],
)
def test_template_of_the_same_shape_is_recognised(go_template: str, expected: tuple[str, ...] | None) -> None:
    own = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    assert foreign_markers(go_template, own) == expected
