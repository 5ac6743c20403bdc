"""Pins and drained nodes outlive a gateway and reach the others; nothing is lost while the database is away."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.fleet.catalogue import Catalogue, LoadPolicy, ModelSpec
from cortex.fleet.topology import ModelOnNode
from cortex.gateway.database import Database
from cortex.gateway.dispatch.operator.state import READ_EVERY, OperatorState

from ...fake_fleet import GB, FakeFleet

PIN = ModelOnNode("n", "a")


class Gateway:
    """A dispatcher and its stored decisions."""

    def __init__(self, database: str) -> None:
        self.fleet = FakeFleet({"n": {"a": GB}, "m": {"a": GB}})
        self.fleet.poll()
        self.dispatcher = self.fleet.dispatcher
        self.state = OperatorState(self.dispatcher, Database(database))

    async def synchronise(self) -> None:
        """As many calls as it takes to read what other gateways decided."""
        for _ in range(READ_EVERY):
            await self.state.synchronise()


async def test_decisions_outlive_a_gateway_and_reach_the_others(database: str) -> None:
    first, second = Gateway(database), Gateway(database)
    first.dispatcher.change_pins(added=[PIN])
    first.dispatcher.drain("m", drained=True)
    await first.state.synchronise()
    await second.synchronise()
    assert (second.dispatcher.pins, second.dispatcher.drained) == (frozenset({PIN}), frozenset({"m"}))
    second.dispatcher.change_pins(removed=[PIN])
    second.dispatcher.drain("m", drained=False)
    await second.state.synchronise()
    third = Gateway(database)
    await third.synchronise()
    assert (third.dispatcher.pins, third.dispatcher.drained) == (frozenset(), frozenset())
    for gateway in (second, third):
        await gateway.state.synchronise()


async def test_changes_of_two_gateways_are_merged(database: str) -> None:
    first, second = Gateway(database), Gateway(database)
    first.dispatcher.change_pins(added=[PIN])
    second.dispatcher.change_pins(added=[ModelOnNode("m", "a")])
    for gateway in (first, second, first, second):
        await gateway.synchronise()
    assert first.dispatcher.pins == second.dispatcher.pins == {PIN, ModelOnNode("m", "a")}
    for gateway in (first, second):
        await gateway.state.synchronise()


async def test_model_that_another_gateway_has_unpinned_is_not_loaded_again(database: str) -> None:
    first, second = Gateway(database), Gateway(database)
    first.dispatcher.change_pins(added=[PIN])
    await first.state.synchronise()
    await second.synchronise()
    await second.state.synchronise()  # the next read is due in a while
    first.dispatcher.change_pins(removed=[PIN])
    await first.state.synchronise()
    assert second.dispatcher.lacks_pinned
    await second.state.before_tick()
    second.dispatcher.tick()
    assert (second.dispatcher.pins, second.fleet.loads) == (frozenset(), [])
    for gateway in (first, second):
        await gateway.state.synchronise()


async def test_no_database_is_created_without_decisions(tmp_path: Path) -> None:
    gateway = Gateway(str(tmp_path / "gateway.db"))
    await gateway.synchronise()
    assert list(tmp_path.iterdir()) == []


async def test_pin_is_kept_and_written_once_the_database_is_back(tmp_path: Path) -> None:
    broken = tmp_path / "state"
    broken.write_text("a file where the directory should be")
    gateway = Gateway(str(broken / "gateway.db"))
    gateway.dispatcher.change_pins(added=[PIN])
    await gateway.synchronise()
    assert gateway.dispatcher.pins == {PIN}
    broken.unlink()
    await gateway.state.synchronise()
    other = Gateway(str(broken / "gateway.db"))
    await other.synchronise()
    assert other.dispatcher.pins == {PIN}
    await other.state.synchronise()


@pytest.mark.parametrize("policy", ["on_demand", "manual"])
async def test_pinned_model_is_loaded_again_whenever_it_is_gone(policy: LoadPolicy) -> None:
    fake = FakeFleet({"n": {"a": GB}}, catalogue=Catalogue(models=(ModelSpec(id="a", load=policy),)))
    fake.poll()
    fake.dispatcher.change_pins(added=[PIN])
    fake.dispatcher.tick()
    assert fake.loads == [("n", "a")]
    fake.dispatcher.tick()
    assert len(fake.loads) == 1, "it is on its way"
    fake.finish_load()
    fake.ready["n"].clear()  # its node has restarted
    fake.poll()
    fake.dispatcher.tick()
    assert fake.loads == [("n", "a")] * 2
