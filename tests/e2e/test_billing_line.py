"""The one edit made to prompts, and its switch: through real gateways, down to the node's own tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import anthropic
import pytest

from cortex.cli.up.demo import SMOLLM2

from ..ports import free_port

if TYPE_CHECKING:
    from .conftest import Run

pytestmark = pytest.mark.e2e

LINE: anthropic.types.TextBlockParam = {
    "type": "text",
    "text": "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch=3f1c2;",
}
PROMPT: anthropic.types.TextBlockParam = {"type": "text", "text": "You are terse."}


@pytest.fixture(scope="module")
def keeping_url(up: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A second gateway in front of the same node that leaves prompts alone."""
    port, metrics_port = free_port(), free_port()
    config = tmp_path_factory.mktemp("keeping") / "cortex.toml"
    config.write_text(
        f'[gateway]\nlisten = "127.0.0.1:{port}"\nmetrics_listen = "127.0.0.1:{metrics_port}"\n'
        "strip_billing_header = false\npoll_interval_s = 0.1\n"
        f'[[neurons]]\nname = "local"\nendpoint = "http://127.0.0.1:{up.neuron_port}"\n'
    )
    source = Path(__file__).parents[2] / "src"
    process = subprocess.Popen(
        [sys.executable, "-m", "cortex.gateway", "--config", str(config)],
        env={
            **os.environ,
            "PYTHONPATH": str(source),
            "CORTEX_GATEWAY__METRICS_LISTEN": f"127.0.0.1:{free_port()}",
        },
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_listed(url)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_listed(url: str) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/v1/models/{SMOLLM2.id}", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise AssertionError(f"{url} never listed the model")


def count(url: str, *system: anthropic.types.TextBlockParam) -> int:
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=120)
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Hello"}]
    counted = client.messages.count_tokens(model=SMOLLM2.id, messages=messages, system=system).input_tokens
    response = client.messages.create(model=SMOLLM2.id, messages=messages, system=system, max_tokens=1)
    assert response.usage.input_tokens + (response.usage.cache_read_input_tokens or 0) == counted
    return counted


def test_billing_line_does_not_reach_the_model_by_default(up: Run) -> None:
    assert count(up.url, LINE, PROMPT) == count(up.url, PROMPT)


def test_billing_line_reaches_the_model_if_the_gateway_keeps_it(up: Run, keeping_url: str) -> None:
    assert count(keeping_url, LINE, PROMPT) > count(keeping_url, PROMPT) + 10
    assert count(keeping_url, PROMPT) == count(up.url, PROMPT)


def test_node_without_a_gateway_removes_the_billing_line_too(up: Run) -> None:
    node_url = f"http://127.0.0.1:{up.neuron_port}"
    assert count(node_url, LINE, PROMPT) == count(up.url, PROMPT)
