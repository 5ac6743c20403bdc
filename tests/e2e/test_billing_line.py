"""The one edit made to prompts, and its switch: through real gateways, down to the node's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anthropic
import pytest

from cortex.cli.up.demo import SMOLLM2

from ..waiting import WAIT_S

if TYPE_CHECKING:
    from .conftest import Run, StartSecondGateway

pytestmark = pytest.mark.e2e

LINE: anthropic.types.TextBlockParam = {
    "type": "text",
    "text": "x-anthropic-billing-header: cc_version=2.1.197; cc_entrypoint=cli; cch=3f1c2;",
}
PROMPT: anthropic.types.TextBlockParam = {"type": "text", "text": "You are terse."}


@pytest.fixture(scope="module")
def keeping_url(start_second_gateway: StartSecondGateway) -> str:
    """The address of a second gateway in front of the same node, which leaves prompts alone."""
    return start_second_gateway(settings="strip_billing_header = false").url


def count(url: str, *system: anthropic.types.TextBlockParam) -> int:
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=WAIT_S)
    messages: list[anthropic.types.MessageParam] = [{"role": "user", "content": "Hello"}]
    counted = client.messages.count_tokens(model=SMOLLM2.id, messages=messages, system=system).input_tokens
    response = client.messages.create(model=SMOLLM2.id, messages=messages, system=system, max_tokens=1)
    assert response.usage.input_tokens + (response.usage.cache_read_input_tokens or 0) == counted
    return int(counted)


def test_billing_line_does_not_reach_the_model_by_default(up: Run) -> None:
    assert count(up.url, LINE, PROMPT) == count(up.url, PROMPT)


def test_billing_line_reaches_the_model_if_the_gateway_keeps_it(up: Run, keeping_url: str) -> None:
    assert count(keeping_url, LINE, PROMPT) > count(keeping_url, PROMPT) + 10
    assert count(keeping_url, PROMPT) == count(up.url, PROMPT)


def test_node_without_a_gateway_removes_the_billing_line_too(up: Run) -> None:
    node_url = f"http://127.0.0.1:{up.neuron_port}"
    assert count(node_url, LINE, PROMPT) == count(up.url, PROMPT)
