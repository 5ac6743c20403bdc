"""Models that exclude each other, with a dispatcher."""

from __future__ import annotations

import pytest

from cortex.fleet.catalogue import Catalogue, ModelSpec, SwapGroup
from cortex.wire.errors import RateLimitExceeded

from ..fake_fleet import GB, FakeFleet, lease_of


def test_members_of_a_swap_group_take_turns_however_many_requests_come() -> None:
    names = ("a", "b", "c")
    catalogue = Catalogue(
        models=tuple(ModelSpec(id=name) for name in names), swap_groups={"llm": SwapGroup(members=names)}
    )
    fake = FakeFleet({"n": dict.fromkeys(names, GB)}, catalogue=catalogue)
    fake.poll()
    first, _, _ = [fake.ask(name) for name in names]
    assert fake.loads == [("n", "a")]  # the others wait, although there is memory for all
    fake.finish_load()
    assert not fake.unloads  # it is in use
    fake.dispatcher.release(lease_of(first))
    fake.poll()
    assert [model for _, model, _ in fake.unloads] == ["a"]
    fake.finish_unload()
    assert fake.loads == [("n", "a"), ("n", "b")]


def test_request_beyond_the_limit_of_a_model_is_rejected_instead_of_queued() -> None:
    catalogue = Catalogue(models=(ModelSpec(id="a", max_requests=2),))
    fake = FakeFleet({"n": {"a": GB}}, catalogue=catalogue)
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    lease = lease_of(fake.ask("a"))
    fake.ask("a")
    with pytest.raises(RateLimitExceeded, match="a already has 2 requests"):
        fake.ask("a")
    fake.dispatcher.release(lease)
    assert fake.ask("a")


def test_model_of_unknown_size_takes_the_rest_of_the_device_until_it_is_measured() -> None:
    names = ("docker", "other")
    fake = FakeFleet({"n": dict.fromkeys(names, 0)}, catalogue=Catalogue(models=tuple(ModelSpec(id=n) for n in names)))
    fake.poll()
    fake.ask("docker")
    fake.ask("other")
    assert fake.loads == [("n", "docker")]
    [reservation] = fake.reservations("n")
    assert reservation.num_bytes == 24 * GB
    fake.sizes["n"]["docker"] = 2 * GB
    fake.finish_load()
    fake.poll()
    assert fake.loads == [("n", "docker"), ("n", "other")]


def test_keep_alive_of_a_request_keeps_its_model_until_it_ends() -> None:
    fake = FakeFleet({"n": {"a": 20 * GB, "b": 20 * GB}}, catalogue=Catalogue(models=(ModelSpec(id="a", ttl_s=5),)))
    fake.ready["n"]["a"] = 900.0
    fake.poll()
    fake.dispatcher.keep("a", 60.0)
    fake.dispatcher.tick()
    fake.ask("b")
    assert not fake.unloads
    fake.now += 61
    fake.poll()
    fake.dispatcher.tick()
    assert [model for _, model, _ in fake.unloads] == ["a"]
