"""What a foreign server gets of a request whose key has a budget: the client's body with the limit of the budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cortex.gateway.ledger.keys import generate
from cortex.gateway.proxy.outgoing_body import MOST_UNASKED_TOKENS, choice_limit
from cortex.parsing.envelope import Facts

from ..fake_neuron import GB
from ..ledger.metered_requests import bearer, opened

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway

BALANCE = 10_000_000


@pytest.mark.parametrize("num_padding", [10, 3_000_000], ids=["small", "large"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"], ids=["relayed", "translated"])
async def test_limit_is_written_into_the_body(
    neurons: StartNeuron, start_gateway: StartGateway, path: str, num_padding: int
) -> None:
    rich, alice = generate("rich"), generate("alice", balance_tokens=BALANCE)
    foreign = await neurons("foreign", sizes={"a": GB})
    client = await start_gateway(foreign=(foreign,), keys=(rich.section, alice.section))
    messages = [{"role": "user", "content": "x" * num_padding}]

    async def sent(key_text: str, **fields: Any) -> dict[str, Any]:
        body = {"model": "a", "messages": messages, "temperature": 0.5, **fields}
        status, response = await client.post(path, body, Authorization=f"Bearer {key_text}")
        assert status == 200, response
        return foreign.seen[-1].body

    assert "max_tokens" not in await sent(rich.text)
    name = "max_tokens" if path == "/v1/messages" else "max_completion_tokens"
    received = await sent(alice.text, **{name: 7_000_000}, n_predict=9)
    assert received["max_tokens"] <= min(7_000_000, BALANCE - num_padding)
    assert received["max_tokens"] > 1_000_000
    assert not {"n_predict", "max_completion_tokens"} & received.keys()
    assert (received["messages"][0]["content"], received["temperature"]) == ("x" * num_padding, 0.5)
    assert (await sent(alice.text, max_tokens=5))["max_tokens"] == 5


@pytest.mark.parametrize(
    "limit",
    [500, 20_000, None],
    ids=["short", "beyond the context", "none"],  # without one, the context ends it
)
async def test_prompt_with_more_bytes_than_the_context_has_tokens_gets_a_response(
    tmp_path: Path, limit: int | None
) -> None:
    alice = generate("alice", balance_tokens=BALANCE)
    ledger, meter = await opened(str(tmp_path / "ledger.db"), alice)
    facts = Facts("a", False, limit, 1)
    reservation = meter.admit(meter.key(bearer(alice)), 10_000, facts, lambda: 8192)
    assert choice_limit(reservation, facts) == limit
    reservation.cancel()
    await ledger.close()


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/embeddings", "input"), ("/api/embed", "input"), ("/api/embeddings", "prompt")]
)
async def test_texts_beyond_the_budget_are_not_sent(
    neurons: StartNeuron, start_gateway: StartGateway, path: str, field: str
) -> None:
    alice = generate("alice", balance_tokens=100)
    foreign = await neurons("foreign", sizes={"e": GB})
    client = await start_gateway(foreign=(foreign,), keys=(alice.section,))
    body = {"model": "e", field: "x" * 1000}
    status, reply = await client.post(path, body, authorization=f"Bearer {alice.text}")
    assert status == 429, reply
    assert not foreign.seen


async def test_choice_without_a_limit_gets_no_more_than_servers_accept(tmp_path: Path) -> None:
    alice = generate("alice", balance_tokens=BALANCE)
    ledger, meter = await opened(str(tmp_path / "ledger.db"), alice)
    facts = Facts("a", False, None, 1)
    reservation = meter.admit(meter.key(bearer(alice)), 200, facts)
    assert choice_limit(reservation, facts) == MOST_UNASKED_TOKENS
    reservation.cancel()
    await ledger.close()
