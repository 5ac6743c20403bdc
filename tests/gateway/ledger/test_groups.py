"""Budgets that keys share, and budgets in money."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.fleet.catalogue import Catalogue, Cost, ModelSpec
from cortex.gateway.config import Config
from cortex.gateway.ledger.groups import GroupSection, budgets_of, cost_nano, nano_per_token, with_values_of_groups
from cortex.gateway.ledger.keys import Keyring, NewKey, generate
from cortex.gateway.ledger.ledger import Ledger
from cortex.gateway.ledger.meter import KeyedMeter, Reservation
from cortex.gateway.ledger.store import open_store
from cortex.gateway.ledger.usage_report import usage
from cortex.wire.errors import InsufficientQuota, RateLimitExceeded
from cortex.wire.events import Usage
from cortex.wire.node.protocol import ModelState

from ..fake_neuron import GB, StartNeuron
from ..started_gateway import StartGateway
from .metered_requests import NOW, Clock, limited

FREE = Cost()
PRICED = Cost(input=1.0, cached_input=0.5, output=2.0)


async def opened(database: str, groups: tuple[GroupSection, ...], *keys: NewKey) -> tuple[Ledger, KeyedMeter]:
    sections = tuple(key.section for key in keys)
    ledger = Ledger(
        open_store(database),
        Keyring(with_values_of_groups(sections, groups)),
        budgets_of(sections, groups),
        flush_s=1000,
        clock=Clock(),
    )
    await ledger.start()
    return ledger, KeyedMeter(ledger)


def admit(meter: KeyedMeter, key: NewKey, cost: Cost = FREE, limit: int = 100) -> Reservation:
    return meter.admit(key.section, 400, limited(limit), lambda _: 8192, lambda _: cost)


def settle(reservation: Reservation, prompt: int, completion: int) -> None:
    reservation.settle(Usage(prompt_tokens=prompt, completion_tokens=completion), model="m", node="n")


async def test_keys_of_a_group_share_its_tokens_also_over_restarts_and_gateways(database: str) -> None:
    lab = GroupSection(name="lab", balance_tokens=1000)
    anna, bert, carl = generate("anna", group="lab"), generate("bert", group="lab"), generate("carl")
    ledger, meter = await opened(database, (lab,), anna, bert, carl)
    settle(admit(meter, anna), 300, 100)
    reservation = admit(meter, bert)
    assert reservation.token_limit is not None
    assert reservation.token_limit <= 600
    settle(reservation, 300, 250)
    await ledger.close()
    ledger, meter = await opened(database, (lab,), anna, bert, carl)
    settle(admit(meter, anna), 25, 25)
    with pytest.raises(InsufficientQuota, match="The group `lab` has 0 of 1000 tokens left"):
        admit(meter, bert)
    settle(admit(meter, carl), 10, 10)
    await ledger.close()
    store = open_store(database)
    rows = usage(store, since=NOW - 60, until=NOW + 60)
    assert {row.name: row.total_tokens for row in rows} == {"bert": 550, "anna": 450, "carl": 20}, "nothing twice"
    store.close_connection()


async def test_budget_in_money_ends_where_the_prices_say(database: str) -> None:
    key = generate("anna", balance_cost=0.001)
    ledger, meter = await opened(database, (), key)
    settle(admit(meter, key), 5000, 5000)
    reservation = admit(meter, key, PRICED, limit=4000)
    assert reservation.token_limit == 500, "a thousandth buys this many tokens at the highest price"
    settle(reservation, 200, 300)
    ledger_account = ledger.budgets(key.section)[0][1]
    assert ledger_account.total_spent() == (200 * 1 + 300 * 2) * 1000
    settle(admit(meter, key, PRICED), 0, 100)
    with pytest.raises(InsufficientQuota, match=r"The key `anna` has 0 of 0.001 \(cost by the prices"):
        admit(meter, key, PRICED)
    settle(admit(meter, key), 5000, 5000)  # a model without prices is free
    await ledger.close()


async def test_request_that_the_group_rejects_leaves_nothing_reserved(tmp_path: object) -> None:
    lab = GroupSection(name="lab", requests_per_min=1)
    anna, bert = generate("anna", group="lab", balance_tokens=10_000), generate("bert", group="lab")
    ledger, meter = await opened(f"{tmp_path}/spend.db", (lab,), anna, bert)
    first = admit(meter, bert)
    with pytest.raises(RateLimitExceeded, match="The group `lab` has used its 1 request per minute"):
        admit(meter, anna)
    assert ledger.account(anna.section).reserved_tokens == 0
    assert ledger.account(anna.section).num_reservations == 0
    first.cancel()
    assert [account.reserved_tokens for _, account in ledger.budgets(bert.section)] == [0]
    await ledger.close()


@given(
    st.builds(Cost, input=st.floats(0, 100), cached_input=st.floats(0, 100), output=st.floats(0, 100)),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_no_usage_costs_more_than_its_tokens_at_the_highest_price(
    cost: Cost, fresh: int, cached: int, completion: int
) -> None:
    used = Usage(prompt_tokens=fresh + cached, cached_tokens=cached, completion_tokens=completion)
    assert cost_nano(cost, used) <= nano_per_token(cost) * (fresh + cached + completion) + 1


def test_group_that_does_not_exist_is_an_error() -> None:
    key = generate("anna", group="lbb").section
    with pytest.raises(ValueError, match="the key `anna` is in the group `lbb`, which does not exist; groups: `lab`"):
        Config(keys=(key,), groups=(GroupSection(name="lab"),))
    with pytest.raises(ValueError, match="two groups are called `lab`"):
        Config(groups=(GroupSection(name="lab"), GroupSection(name="lab")))


async def test_gateway_enforces_models_and_money_of_a_group(neurons: StartNeuron, start_gateway: StartGateway) -> None:
    lab = GroupSection(name="lab", models=("a*",), window_cost=0.00005)
    anna = generate("anna", group="lab", operator=True, window_cost=1.0)
    beast = await neurons("beast", sizes={"a": GB, "b": GB}, states={"a": ModelState.READY, "b": ModelState.READY})
    catalogue = Catalogue(models=(ModelSpec(id="a", cost=PRICED), ModelSpec(id="b")))
    client = await start_gateway(beast, keys=(anna.section,), groups=(lab,), catalogue=catalogue)
    headers = {"Authorization": f"Bearer {anna.text}"}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    status, response = await client.post("/v1/chat/completions", {"model": "b", **body}, **headers)
    assert status == 403, response
    for _ in range(20):
        status, response = await client.post("/v1/chat/completions", {"model": "a", **body}, **headers)
        if status != 200:
            break
    assert status == 429
    assert "The group `lab`" in response["error"]["message"]
    _, listed = await client.get("/keys", **headers)
    assert listed["keys"][0]["group"] == "lab"
    assert 0 < listed["keys"][0]["window_left_cost"] < 1
