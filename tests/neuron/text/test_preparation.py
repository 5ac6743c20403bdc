"""From a request to tokens."""

from __future__ import annotations

from typing import Any

import pytest

from cortex.neuron.text.preparation import prepare
from cortex.neuron.text.template.prompt import PromptRules
from cortex.wire.errors import InvalidValue
from cortex.wire.requests import GenerateRequest


def test_prediction_has_the_limit_of_a_prompt(make_model: Any) -> None:
    text, rules = make_model("qwen3"), PromptRules(max_characters=8)
    fits = GenerateRequest(model="m", prompt="x", prediction="12345678")
    assert prepare(text, fits, rules).prediction == tuple(text.encode("12345678"))
    with pytest.raises(InvalidValue, match=r"text\.max_prompt_mb") as raised:
        prepare(text, GenerateRequest(model="m", prompt="x", prediction="123456789"), rules)
    assert raised.value.param == "prediction"
