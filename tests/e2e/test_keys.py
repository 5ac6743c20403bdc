"""A gateway with keys: the SDKs' own errors for a wrong key, and the usage records after a right one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anthropic
import openai
import pytest

from cortex.cli.up.demo import SMOLLM2
from cortex.gateway.ledger.keys import as_toml, generate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conftest import Run, Start

pytestmark = pytest.mark.e2e

KEY = generate("anna", models=("smollm2*",))
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keyed") / "cortex.toml"
    path.write_text(as_toml(KEY.section))
    return path


@pytest.fixture(scope="module")
def keyed(start: Start, config: Path) -> Iterator[Run]:
    run = start("--config", str(config))
    run.wait_ready()
    yield run
    assert run.stop(signal.SIGTERM) == 0
    run.assert_nothing_left()


def ask_openai(run: Run, key: str) -> openai.types.chat.ChatCompletion:
    client = openai.OpenAI(base_url=f"{run.url}/v1", api_key=key, max_retries=0, timeout=60)
    return client.chat.completions.create(model=SMOLLM2.id, messages=QUESTION, max_tokens=4)  # type: ignore[arg-type]


def ask_anthropic(run: Run, key: str) -> anthropic.types.Message:
    client = anthropic.Anthropic(base_url=run.url, api_key=key, max_retries=0, timeout=60)
    return client.messages.create(model=SMOLLM2.id, messages=QUESTION, max_tokens=4)  # type: ignore[arg-type]


WRONG_KEYS = {
    "any word": "any",
    "another service's": "sk-proj-something",
    "too short": "ck-short",
    "wrong character": KEY.text[:-1] + "!",
    "too long": KEY.text + "x",
}


@pytest.mark.parametrize("key", WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_malformed_key_is_an_authentication_error_for_both_clients(keyed: Run, key: str) -> None:
    with pytest.raises(openai.AuthenticationError) as rejection:
        ask_openai(keyed, key)
    assert rejection.value.code == "invalid_api_key"
    with pytest.raises(anthropic.AuthenticationError) as rejected:
        ask_anthropic(keyed, key)
    assert rejected.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_request_with_the_right_key_is_served_and_recorded(keyed: Run, config: Path) -> None:
    assert ask_openai(keyed, KEY.text).choices
    assert ask_anthropic(keyed, KEY.text).content
    command = [sys.executable, "-m", "cortex.cli.cortex", "usage", "--config", str(config), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    deadline = time.monotonic() + 60
    while True:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment).stdout
        rows = json.loads(shown)
        if rows and rows[0]["requests"] == 2:
            break
        assert time.monotonic() < deadline, shown
        time.sleep(0.2)
    assert rows[0]["name"] == "anna"
    assert rows[0]["completion_tokens"] == 8
