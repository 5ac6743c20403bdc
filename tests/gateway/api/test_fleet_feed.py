"""The feed of nodes: who gets which event, and how often the fleet is described for it."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.topology import Fleet, Node, Residency
from cortex.gateway.api.live import fleet_feed
from cortex.gateway.api.live.fleet_feed import FleetFeed
from cortex.gateway.api.live.public_view import FleetView
from cortex.gateway.api.models import entry
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.ledger.keys import generate
from cortex.http.server.exchange import Exchange
from cortex.wire.node.protocol import ModelState, ModelStatus

OPERATOR = FleetView(is_operator=True)
USER, OTHER = (FleetView(is_operator=False, key=generate(name, models=(f"{name}*",)).section) for name in ("a", "b"))


def held(model: str, age_s: float) -> dict[str, Residency]:
    status = ModelStatus(id=model, state=ModelState.READY, state_age_s=age_s)
    return {model: Residency(status=status, seen_at=0.0)}


class SeenFleet:
    """What the feed reads of a dispatcher: two models, each ready on a node with its name."""

    def __init__(self) -> None:
        self.fleet = Fleet(nodes=tuple(Node(name=name, healthy=True, residencies=held(name, 1.0)) for name in "ab"))
        self.queue_depths: dict[str, int] = {}

    def change(self, name: str, **facts: Any) -> None:
        (node,) = (node for node in self.fleet.nodes if node.name == name)
        changed = msgspec.structs.replace(node, **facts)
        nodes = tuple(changed if each is node else each for each in self.fleet.nodes)
        self.fleet = msgspec.structs.replace(self.fleet, nodes=nodes)


class Reading:
    """What a client was sent."""

    def __init__(self) -> None:
        self.paused = False
        self.frames: list[bytes] = []

    def write(self, frame: bytes) -> None:
        self.frames.append(frame)

    def kinds(self) -> list[str]:
        kinds = [frame.split(b"\n")[0].removeprefix(b"event: ").decode() for frame in self.frames]
        self.frames.clear()
        return kinds


def test_fleet_is_described_once_for_all_keys_with_models_and_sent_to_those_that_see_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    described = []
    describe = fleet_feed.node_statuses

    def counted(fleet: Fleet) -> list[dict[str, Any]]:
        described.append(fleet)
        return describe(fleet)

    monkeypatch.setattr(fleet_feed, "node_statuses", counted)
    seen = SeenFleet()
    feed = FleetFeed(cast("Dispatcher", seen))
    readers = {view: Reading() for view in (OPERATOR, USER, OTHER)}
    for view, reader in readers.items():
        feed.follow(cast("Exchange", reader), view)
        assert reader.kinds() == ["fleet"]

    def sent() -> list[list[str]]:
        described.clear()
        feed.tick()
        return [reader.kinds() for reader in readers.values()]

    assert (sent(), described) == ([[], [], []], []), "nothing has changed"
    seen.change("a", problem="slow", residencies=held("a", 2.0))
    assert sent() == [["node"], [], []], "to others nothing but an age has changed"
    seen.change("b", residencies={})
    assert sent() == [["node"], [], ["fleet"]]
    assert len(described) == 1
    readers[USER].paused = True
    seen.change("a", residencies={})
    assert sent() == [["node"], [], []]
    readers[USER].paused = False
    assert sent() == [[], ["fleet"], []], "what it has missed"


def test_reason_of_the_last_failed_load_is_shown_while_the_model_is_cold() -> None:
    """To operators. Others see that there is one. Files that nobody tried to load have no failure."""
    broken = ModelStatus(id="a", state=ModelState.COLD, reason="no /srv/a", state_age_s=99.0)
    unused = ModelStatus(id="b", state=ModelState.COLD, reason="not supported")
    seen = SeenFleet()
    before = fleet_feed.node_statuses(seen.fleet)[0]
    seen.change("a", residencies={each.id: Residency(status=each, seen_at=0.0) for each in (broken, unused)})
    status = fleet_feed.node_statuses(seen.fleet)[0]
    assert (before["cold_reasons"], status["cold_reasons"]) == ({}, {"a": "no /srv/a"})
    assert OPERATOR.node(status)["cold_reasons"] == {"a": "no /srv/a"}
    assert "/srv" not in str(USER.node(status))
    assert USER.node(status)["cold_reasons"].keys() == {"a"}
    listed = [entry(seen.fleet, ModelSpec(id="a"), lambda _: (), 0, for_operator=each) for each in (True, False)]
    assert [each.get("failures") for each in listed] == [{"a": "no /srv/a"}, None]
