"""Every route in docs/api.md exists, with the documented method and for the documented clients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.gateway.ledger.keys import generate
from cortex.wire.node.protocol import ModelState

from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import Client, StartGateway


TEXT = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
NAMES = {"{model}": "a", "{node}": "beast", "{id}": "x", "{name}": "nobody", "{item}": "y", "{digest}": "0" * 64}


def documented() -> list[tuple[str, str, str]]:
    """(method, path, who)"""
    found = []
    for line in TEXT.splitlines():
        if line.startswith("| `"):
            routes, who = line.split("|")[1:3]
            found += [
                (method, path.partition("?")[0], who.strip())
                for method, path in re.findall(r"`([A-Z]+) ([^`]+)`", routes)
            ]
    return found


def test_the_document_is_read() -> None:
    assert len(documented()) > 25
    assert {who for _, _, who in documented()} == {"everybody", "own", "every key", "operator"}


@pytest.fixture
async def client(neurons: StartNeuron, start_gateway: StartGateway) -> tuple[Client, dict[str, str]]:
    anna = generate("anna")
    beast = await neurons("beast", sizes={"a": GB}, states={"a": ModelState.READY})
    started = await start_gateway(beast, keys=(anna.section,))
    return started, {"Authorization": f"Bearer {anna.text}"}


async def test_documented_routes_exist_and_are_for_the_documented_clients(
    client: tuple[Client, dict[str, str]],
) -> None:
    gateway, as_anna = client
    for method, path, who in documented():
        for name, value in NAMES.items():
            path = path.replace(name, value)
        for headers in ({}, as_anna):
            async with gateway.session.request(method, gateway.url + path, headers=headers) as response:
                if response.headers["content-type"].startswith("application/json"):
                    body = await response.json()
                    error = body.get("error") or {}
                    if isinstance(error, str):  # in Ollama's form
                        error = {"message": error, "code": body["code"]}
                else:
                    error = {}
            where = f"{method} {path} {'with' if headers else 'without'} a key"
            assert error.get("code") != "method_not_allowed", where
            assert "There is no /" not in error.get("message", ""), where
            if who == "everybody":
                assert response.status == 200, where
            elif not headers:
                assert response.status == 401, where
            else:
                assert (error.get("code") == "operator_only") == (who == "operator"), f"{where}: {error}"
