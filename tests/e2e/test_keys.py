"""A gateway with keys: the SDKs' own errors for a wrong key, and the usage records after a right one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anthropic
import openai
import pytest

from cortex.cli.up.demo import SMOLLM2
from cortex.gateway.ledger.keys import as_toml, generate

from ..waiting import WAIT_S, wait_until

if TYPE_CHECKING:
    from .conftest import Gateway, StartSecondGateway

pytestmark = pytest.mark.e2e

KEY = generate("anna", models=("smollm2*",))
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def keyed(start_second_gateway: StartSecondGateway) -> Gateway:
    return start_second_gateway(as_toml(KEY.section), key=KEY.text)


def ask_openai(gateway: Gateway, key: str) -> openai.types.chat.ChatCompletion:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S)
    return client.chat.completions.create(model=SMOLLM2.id, messages=QUESTION, max_tokens=4)


def ask_anthropic(gateway: Gateway, key: str) -> anthropic.types.Message:
    client = anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0, timeout=WAIT_S)
    return client.messages.create(model=SMOLLM2.id, messages=QUESTION, max_tokens=4)


WRONG_KEYS = {
    "any word": "any",
    "another service's": "sk-proj-something",
    "too short": "ck-short",
    "wrong character": KEY.text[:-1] + "!",
    "too long": KEY.text + "x",
}


@pytest.mark.parametrize("key", WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_malformed_key_is_an_authentication_error_for_both_clients(keyed: Gateway, key: str) -> None:
    with pytest.raises(openai.AuthenticationError) as rejection:
        ask_openai(keyed, key)
    assert rejection.value.code == "invalid_api_key"
    with pytest.raises(anthropic.AuthenticationError) as rejected:
        ask_anthropic(keyed, key)
    assert rejected.value.body["error"]["type"] == "authentication_error"


def test_request_with_the_right_key_is_served_and_recorded(keyed: Gateway) -> None:
    assert ask_openai(keyed, KEY.text).choices
    assert ask_anthropic(keyed, KEY.text).content
    command = [sys.executable, "-m", "cortex.cli.cortex", "usage", "--config", str(keyed.config), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}

    def usage() -> list[dict[str, Any]]:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S, env=environment)
        return [row for row in json.loads(run.stdout) if row["requests"] == 2]

    (row,) = wait_until(usage)
    assert row["name"] == "anna"
    assert row["completion_tokens"] == 8
