"""Books are closed late, but each exactly once, and never too late for whoever depends on them."""

from __future__ import annotations

import asyncio
import gc
import signal

import pytest
from fake_neuron import GB, until

from cortex.gateway import closings
from cortex.gateway.closings import MAX_OPEN, Closings
from cortex.gateway.http.exchange import Exchange
from cortex.gateway.http.relay import Relay
from cortex.gateway.ledger import generate, open_store
from cortex.gateway.passage import Passage
from cortex.gateway.record import Record
from cortex.wire.node import ModelState

READY = ModelState.READY
TOKENS = 10
"""Of every answer of the fake node."""


class Loop:
    """Remembers what it is to call, and calls it when the test says so."""

    def __init__(self) -> None:
        self.due: list[tuple[float, object]] = []

    def call_later(self, delay_s, callback):
        self.due.append((delay_s, callback))

    def call_soon(self, callback):
        self.due.append((0.0, callback))

    def turn(self) -> None:
        due, self.due = self.due, []
        for _, callback in due:
            callback()


class Books:
    def __init__(self, number: int, closed: list[int]) -> None:
        self._number = number
        self._closed = closed

    def close(self) -> None:
        self._closed.append(self._number)
        if self._number < 0:
            raise ValueError("unreadable")


def test_a_crowd_is_closed_one_by_one_in_the_order_in_which_it_came():
    loop, closed = Loop(), []
    room = Closings(loop)
    for number in range(5):
        room.add(Books(number, closed))
    assert [delay_s for delay_s, _ in loop.due] == [closings.DELAY_S]
    assert closed == []
    for num_closed in range(1, 6):
        loop.turn()
        assert closed == list(range(num_closed))
    assert loop.due == []
    room.add(Books(99, closed))
    loop.turn()
    assert closed[-1] == 99
    assert len(room) == 0


def test_no_more_than_so_many_wait():
    loop, closed = Loop(), []
    room = Closings(loop)
    for number in range(MAX_OPEN + 10):
        room.add(Books(number, closed))
    assert closed == list(range(10))
    assert len(room) == MAX_OPEN
    assert len(loop.due) == 1


def test_all_are_closed_at_once_for_who_needs_it_and_none_twice():
    loop, closed = Loop(), []
    room = Closings(loop)
    assert not room.drain()
    for number in range(3):
        room.add(Books(number, closed))
    assert room.drain()
    assert not room.drain()
    loop.turn()
    assert closed == [0, 1, 2]
    assert loop.due == []


def test_one_that_cannot_be_closed_keeps_no_other_open(caplog):
    loop, closed = Loop(), []
    room = Closings(loop)
    for number in (1, -2, 3):
        room.add(Books(number, closed))
    for _ in range(3):
        loop.turn()
    assert closed == [1, -2, 3]
    assert "may not be billed" in caplog.text


@pytest.fixture
def never_by_itself(monkeypatch):
    monkeypatch.setattr(closings, "DELAY_S", 3600.0)


@pytest.mark.usefixtures("never_by_itself")
async def test_open_books_deny_nobody_what_is_left_of_a_budget(neurons, start_gateway):
    """Each request reserves nearly all of the balance, and gives nearly all of it back when it is settled."""
    key = generate("alice", balance_tokens=1000)
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, keys=(key.section,))
    body = {"model": "a", "messages": [], "max_tokens": 900}
    headers = {"Authorization": f"Bearer {key.text}"}
    for _ in range(5):
        status, answer = await client.post("/v1/chat/completions", body, **headers)
        assert status == 200, answer
    account = client.gateway._metering._book.account(key.section)
    assert len(client.gateway._services.closings) == 1
    assert account.total_spent() == 4 * TOKENS
    status, _ = await client.post("/v1/chat/completions", body | {"max_tokens": 990}, **headers)
    assert status == 429, "what is really spent stays spent"
    assert (account.total_spent(), account.reserved_tokens) == (5 * TOKENS, 0)


@pytest.mark.usefixtures("never_by_itself")
async def test_the_seat_at_the_node_is_free_before_the_books_are_closed(neurons, start_gateway):
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    assert (await client.chat("a"))[0] == 200
    assert len(client.gateway._services.closings) == 1
    assert client.gateway.dispatcher.in_flight == {}
    assert 'cortex_requests_total{model="a",node="beast"} 1.0' in client.metrics(), "a scrape waits for nothing"


async def test_books_are_closed_without_being_asked(neurons, start_gateway):
    key = generate("alice", balance_tokens=10_000)
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast, keys=(key.section,))
    account = client.gateway._metering._book.account(key.section)
    body = {"model": "a", "messages": [], "stream": True}
    headers = {"Authorization": f"Bearer {key.text}"}

    async def ask() -> None:
        async with client.session.post(client.url + "/v1/chat/completions", json=body, headers=headers) as response:
            await response.read()

    await asyncio.gather(*(ask() for _ in range(9)))
    await until(lambda: account.reserved_tokens == 0)
    assert account.total_spent() == 9 * TOKENS


@pytest.mark.parametrize("num_processes", [1, 2])
async def test_a_process_that_is_asked_to_stop_closes_its_books_first(
    neurons, spawn, tmp_path, strangers, num_processes
):
    """The last answers have just ended when the signal comes: what they used is in the database, once."""
    key = generate("alice")
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    keys = f'[[keys]]\nname = "alice"\nid = "{key.section.id}"\nsha256 = "{key.section.sha256}"\n'
    gateway = await spawn(beast, f'workers = {num_processes}\nstate = "{tmp_path}/state"\n{keys}')
    num_requests = 24

    async def ask() -> None:
        body = {"model": "a", "messages": [], "stream": True}
        headers = {"Authorization": f"Bearer {key.text}"}
        url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
        async with strangers.post(url, json=body, headers=headers) as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")

    await asyncio.gather(*(ask() for _ in range(num_requests)))
    gateway.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(gateway.process.wait(), 15) == 0
    (database,) = (tmp_path / "state").glob("*.db")
    store = open_store(str(database))
    ((_, name, counts),) = store.usage("key", since=0, until=1e11)
    store.close()
    assert (name, counts.requests, counts.tokens) == ("alice", num_requests, num_requests * TOKENS)


async def test_an_answered_request_leaves_nothing_for_the_garbage_collector(neurons, start_gateway):
    """What refers back to itself stays until a search finds it, and a search stops every stream."""
    beast = await neurons("beast", sizes={"a": GB}, states={"a": READY})
    client = await start_gateway(beast)
    kinds = (Exchange, Passage, Record, Relay)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            assert (await client.chat("a"))[0] == 200
            assert b"[DONE]" in await client.stream(
                "/v1/chat/completions", {"model": "a", "messages": [], "stream": True}
            )
        client.gateway._services.closings.drain()
        left = [each for each in gc.get_objects() if isinstance(each, kinds)]
    finally:
        gc.enable()
    assert left == []
