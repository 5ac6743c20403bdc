"""Who uses the cached prefixes of whom: keys, groups and salts, through gateways down to the pages of a node."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from cortex.gateway.ledger.keys import as_toml, generate

from ..conftest import TINY

if TYPE_CHECKING:
    from ..conftest import Daemon, StartGateway

pytestmark = pytest.mark.e2e

KEYS = {
    "anna": generate("anna", operator=True),
    "bert": generate("bert", group="lab"),
    "cleo": generate("cleo", group="lab"),
}
SECTIONS = "".join(as_toml(key.section) for key in KEYS.values()) + '[[groups]]\nname = "lab"\n'
Ask = Callable[..., int]
"""A client, a text and more fields → how many tokens of it were cached."""
_numbers = itertools.count(100)


def _gateway(start: StartGateway, daemon: Daemon, settings: str = "") -> dict[str, Daemon]:
    """A gateway with keys, as each of them sees it."""
    started = start("", {"node": daemon}, settings=settings, sections=SECTIONS, key=KEYS["anna"].text)
    return {name: replace(started, key=key.text) for name, key in KEYS.items()}


@pytest.fixture(scope="module")
def clients(start_gateway: StartGateway, daemon: Daemon) -> Iterator[dict[str, Daemon]]:
    """Clients of a gateway with keys and without further settings."""
    yield _gateway(start_gateway, daemon)
    daemon.call("/models/unload", {"model_id": TINY})


@pytest.fixture(scope="module")
def anna(clients: dict[str, Daemon]) -> Daemon:
    return clients["anna"]


@pytest.fixture(scope="module")
def bert(clients: dict[str, Daemon]) -> Daemon:
    return clients["bert"]


def secret() -> str:
    """A text of 165 bytes, one token each. Its first page is of no other text."""
    return f"{next(_numbers)}: the vault opens with a PIN that only its keeper knows. " * 3 + "It is 4711."


def _ask(client: Daemon, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, response = client.call(path, {"model": TINY, "temperature": 0, **body})
    assert status == 200, response
    return dict(response)


def complete(client: Daemon, text: str, **more: Any) -> int:
    usage = _ask(client, "/v1/completions", {"prompt": text, "max_tokens": 1, **more})["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def chat(client: Daemon, text: str, **more: Any) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}
    return int(_ask(client, "/v1/chat/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"])


def respond(client: Daemon, text: str, **more: Any) -> int:
    usage = _ask(client, "/v1/responses", {"input": text, "max_output_tokens": 1, **more})["usage"]
    return int(usage["input_tokens_details"]["cached_tokens"])


def message(client: Daemon, text: str, **more: Any) -> int:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}
    return int(_ask(client, "/v1/messages", body)["usage"]["cache_read_input_tokens"])


DIALECTS = pytest.mark.parametrize("ask", [complete, chat, respond, message])


@DIALECTS
def test_key_finds_no_prefix_of_another_key(clients: dict[str, Daemon], ask: Ask) -> None:
    text = secret()
    assert [ask(clients[name], text) for name in ("anna", "bert", "cleo")] == [0, 0, 0]
    assert all(ask(clients[name], text) >= 128 for name in ("anna", "bert", "cleo"))


def test_guess_of_a_secret_looks_the_same_whether_it_is_right_or_wrong(anna: Daemon, bert: Daemon) -> None:
    text = secret()
    complete(anna, text + " Yours, Anna, who writes a little more than a page after it.")
    guesses = [text.replace("4711", f"{pin}") + " Yours, Anna," for pin in range(4705, 4715)]
    first, *later = [complete(bert, guess) for guess in guesses]
    assert first == 0
    assert len(set(later)) == 1, "each has only in common with earlier ones what the guesser sent"


@DIALECTS
def test_requests_of_one_key_with_other_salts_share_nothing(anna: Daemon, bert: Daemon, ask: Ask) -> None:
    text = secret()
    assert ask(anna, text) == 0
    assert ask(anna, text, cache_salt="one") == 0
    assert ask(anna, text, cache_salt="two") == 0
    assert ask(bert, text, cache_salt="one") == 0, "a salt narrows, and opens nothing"
    assert ask(anna, text, cache_salt="one") >= 128
    assert ask(anna, text) >= 128


def test_prefixes_in_host_memory_are_those_of_their_key_too(daemon: Daemon, anna: Daemon, bert: Daemon) -> None:
    text = secret()
    assert complete(anna, text) == 0
    status, model = daemon.call("/models/unload", {"model_id": TINY, "sleep": True})
    assert status == 200, model
    assert complete(bert, text) == 0
    assert complete(anna, text) >= 128


def test_keys_of_a_group_share_prefixes_where_the_operator_says_so(start_gateway: StartGateway, daemon: Daemon) -> None:
    clients, text = _gateway(start_gateway, daemon, 'prefix_sharing = "group"'), secret()
    assert complete(clients["bert"], text) == 0
    assert complete(clients["anna"], text) == 0, "a key without a group has its own"
    assert complete(clients["cleo"], text) >= 128


def test_clients_that_nobody_tells_apart_share_prefixes_with_each_other_only(daemon: Daemon, anna: Daemon) -> None:
    text = secret()
    assert complete(daemon, text) == 0
    assert complete(daemon, text) >= 128
    assert complete(daemon, text, cache_salt="mine") == 0
    assert complete(anna, text) == 0


def test_stored_response_is_continued_with_its_prefix(anna: Daemon) -> None:
    first = _ask(anna, "/v1/responses", {"input": secret(), "max_output_tokens": 4})
    assert respond(anna, "And then?", previous_response_id=first["id"]) >= 128
