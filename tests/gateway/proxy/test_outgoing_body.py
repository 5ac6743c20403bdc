"""What a foreign server gets of a request: the client's body with the limit of a budget, and no addresses of media."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from cortex.fleet.topology import Abilities, ModelOnNode
from cortex.gateway.config import NeuronSection
from cortex.gateway.dispatch.leases import Lease
from cortex.gateway.dispatch.nodes.poller import FOREIGN_DIALECTS
from cortex.gateway.ledger.keys import generate
from cortex.gateway.proxy.admission import AdmittedRequest, ReceivedRequest
from cortex.gateway.proxy.outgoing_body import MOST_UNASKED_TOKENS, OutgoingBody, choice_limit
from cortex.gateway.proxy.routes import CHAT, ROUTES, InferenceRoute
from cortex.parsing import envelope as envelopes
from cortex.parsing.parser import BodyParser
from cortex.wire.errors import InvalidValue
from cortex.wire.request_summary import RequestSummary

from ...picture_files import data_url, picture
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

    if path != "/v1/messages":  # which has a limit
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
    summary = RequestSummary("a", False, limit, 1)
    reservation = meter.admit(meter.key(bearer(alice)), 10_000, summary, lambda _: 8192)
    assert choice_limit(reservation, summary, 10_000) == limit
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
    summary = RequestSummary("a", False, None, 1)
    reservation = meter.admit(meter.key(bearer(alice)), 200, summary)
    assert choice_limit(reservation, summary, 200) == MOST_UNASKED_TOKENS
    reservation.cancel()
    await ledger.close()


def outgoing(route: InferenceRoute, body: bytes) -> OutgoingBody:
    admitted = SimpleNamespace(model="m", key=None, reservation=SimpleNamespace(token_limit=None))
    envelope = envelopes.read_relayed(body, route.dialect, generates=True, strip_billing=False).envelope
    exchange = SimpleNamespace(request=SimpleNamespace(client="alice"))
    received = SimpleNamespace(exchange=exchange, route=route, body=body, envelope=envelope, id=b"req_1")
    return OutgoingBody(cast("ReceivedRequest", received), cast("AdmittedRequest", admitted), None)


def lease(*, is_ours: bool) -> Lease:
    dialects = (*FOREIGN_DIALECTS, "anthropic_messages") if is_ours else FOREIGN_DIALECTS
    return Lease("n", "m", ModelOnNode("n", "m"), Abilities(is_ours, is_ours, dialects=dialects))


def picture_body(route: InferenceRoute, url: str, num_padding: int = 0) -> bytes:
    if route is CHAT:
        part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    else:
        part = {"type": "image", "source": {"type": "url", "url": url}}
    content = [{"type": "text", "text": "see https://example.com" + "x" * num_padding}, part]
    return msgspec.json.encode({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": content}]})


@pytest.mark.parametrize("route", [CHAT, ROUTES[b"/v1/messages"]], ids=["relayed", "translated"])
def test_foreign_server_gets_no_address_of_a_picture(route: InferenceRoute) -> None:
    body = outgoing(route, picture_body(route, "https://10.0.0.1/x.png"))
    assert body.choose(lease(is_ours=True))
    assert body.made()[1] == picture_body(route, "https://10.0.0.1/x.png"), "our own nodes reject it themselves"
    assert body.choose(lease(is_ours=False))
    with pytest.raises(InvalidValue, match=r"address|may not fetch"):
        body.made()


async def test_large_body_for_a_foreign_server_is_written_elsewhere() -> None:
    body = outgoing(CHAT, picture_body(CHAT, data_url(picture(8, 8)), 200_000))
    parser = BodyParser()
    assert not body.choose(lease(is_ours=False))
    await body.prepare(parser)
    assert body.choose(lease(is_ours=False))
    assert body.made()[1] == picture_body(CHAT, data_url(picture(8, 8)), 200_000)
    assert body.choose(lease(is_ours=True)), "our own nodes get the client's bytes"
    await parser.close()


@pytest.mark.parametrize("num_padding", [10, 3_000_000], ids=["small", "large"])
@pytest.mark.parametrize("has_budget", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/embed"])
async def test_operators_filters_apply_to_whatever_a_foreign_server_gets(
    neurons: StartNeuron, start_gateway: StartGateway, path: str, has_budget: bool, num_padding: int
) -> None:
    alice = generate("alice", balance_tokens=BALANCE) if has_budget else generate("alice")
    foreign = await neurons("foreign", sizes={"a": GB})
    filters = {"set_params": {"provider": {"zdr": True}, "top_p": 0.5}, "strip_params": ("temperature",)}
    client = await start_gateway(foreign=(foreign,), foreign_options=filters, keys=(alice.section,))
    text = "x" * num_padding
    prompt: dict[str, Any] = (
        {"input": text} if path == "/api/embed" else {"messages": [{"role": "user", "content": text}]}
    )
    if path != "/api/embed":
        prompt |= {"temperature": 0.1, "top_p": 0.9, "max_tokens": 7}
    await client.post(path, {"model": "a", **prompt}, Authorization=f"Bearer {alice.text}")
    received = foreign.seen[-1].body
    assert (received["model"], received["provider"], received["top_p"]) == ("a", {"zdr": True}, 0.5)
    assert "temperature" not in received
    if path != "/api/embed":
        assert received["max_tokens"] == 7


async def test_only_the_named_models_of_a_foreign_server_are_used(
    neurons: StartNeuron, start_gateway: StartGateway
) -> None:
    foreign = await neurons("foreign", sizes={"a": GB, "b": GB})
    client = await start_gateway(foreign=(foreign,), foreign_options={"models": ("a", "unlisted")})
    assert [each["id"] for each in (await client.get("/v1/models"))[1]["data"]] == ["a", "unlisted"]
    assert (await client.post("/v1/chat/completions", {"model": "b", "messages": []}))[0] == 404
    message = {"role": "user", "content": "hi"}
    assert (await client.post("/v1/chat/completions", {"model": "unlisted", "messages": [message]}))[0] == 200


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "neuron", "models": ("a",)}, "is a neuron"),
        ({"kind": "openai", "set_params": {"stream": True}}, "cannot have"),
        ({"kind": "openai", "strip_params": ("model",)}, "cannot have"),
    ],
)
def test_filters_that_cannot_apply_are_rejected(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        NeuronSection(name="x", endpoint="http://x", **options)
