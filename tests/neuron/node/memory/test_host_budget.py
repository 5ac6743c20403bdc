"""One budget of host memory: weights of loaded models, then sleeping models, the longest idle of which is unloaded
first, then KV pages."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.engine.memory.host import HostMemory
from cortex.neuron.engine.request import KeptPages
from cortex.neuron.node.memory.host_budget import (
    HostBudget,
    HostLimits,
    HostModel,
    KvHostMemory,
    SleepPlan,
    can_sleep,
    make_room,
)
from cortex.neuron.worker.supervisor import WorkerSupervisor
from cortex.wire.errors import InsufficientCapacity
from cortex.wire.node.protocol import Device


def sleeping(model_id: str, host_bytes: int, idle_s: float, can_be_unloaded: bool = True) -> HostModel:
    return HostModel(model_id, host_bytes, idle_s, sleeps=True, can_be_unloaded=can_be_unloaded)


def loaded(model_id: str, host_bytes: int) -> HostModel:
    return HostModel(model_id, host_bytes, 0.0, sleeps=False, locked_bytes=host_bytes // 2)


MIB = 1 << 20
A, B, C = sleeping("a", 40, 10.0), sleeping("b", 30, 99.0), sleeping("c", 20, 50.0)


@pytest.mark.parametrize(
    ("need", "budget", "sleeping_models", "room"),
    [
        (10, 0, [], SleepPlan(fits=False)),
        (10, 10, [], SleepPlan(fits=True)),
        (10, 100, [A, B, C], SleepPlan(fits=True)),
        (11, 100, [A, B, C], SleepPlan(fits=True, to_unload=("b",))),
        (50, 100, [A, B, C], SleepPlan(fits=True, to_unload=("b", "c"))),
        (100, 100, [A, B, C], SleepPlan(fits=True, to_unload=("b", "c", "a"))),
        (101, 100, [A, B, C], SleepPlan(fits=False)),
        (71, 100, [sleeping("waking", 30, 999.0, can_be_unloaded=False), B], SleepPlan(fits=False)),
        (70, 100, [sleeping("waking", 30, 999.0, can_be_unloaded=False), B], SleepPlan(fits=True, to_unload=("b",))),
    ],
)
def test_unloads_the_longest_idle_first_and_only_as_many_as_needed(
    need: int, budget: int, sleeping_models: list[HostModel], room: SleepPlan
) -> None:
    assert make_room(need, budget, sleeping_models) == room


sleeping_models = st.lists(
    st.builds(sleeping, st.uuids().map(str), st.integers(1, 100), st.floats(0, 100), st.booleans()), max_size=8
)


@given(st.integers(1, 200), st.integers(0, 400), sleeping_models)
def test_what_is_left_fits_and_nothing_is_unloaded_otherwise(need: int, budget: int, held: list[HostModel]) -> None:
    room = make_room(need, budget, held)
    left = [each for each in held if each.model_id not in room.to_unload]
    total = sum(each.host_bytes for each in left)
    if room.fits:
        assert total + need <= budget
        assert all(each.can_be_unloaded for each in held if each.model_id in room.to_unload)
    else:
        assert not room.to_unload
        assert sum(each.host_bytes for each in held if not each.can_be_unloaded) + need > budget


CPU = Device(index=0, kind="cpu", name="cpu", total_bytes=100)
GPU = Device(index=0, kind="cuda", name="gpu", total_bytes=100)


@pytest.mark.parametrize(
    ("sleep_mb", "device", "held", "budget"),
    [(None, CPU, 0, 0), (None, GPU, 0, 500), (None, GPU, 600, 800), (3, CPU, 0, 3 << 20), (0, GPU, 0, 0)],
)
def test_sleeping_models_get_the_configured_bytes_or_a_share_of_free_host_memory(
    sleep_mb: int | None, device: Device, held: int, budget: int
) -> None:
    assert HostLimits((device,), sleep_mb=sleep_mb).sleep_bytes(HostMemory(4000, 1000), held) == budget
    assert can_sleep(sleep_mb, [device]) is (budget > 0)


@pytest.mark.parametrize(
    ("host_mb", "free_mib", "held_mib", "budget_mib"),
    [
        (None, 500, 0, 400),  # a tenth of the host stays free
        (None, 500, 300, 700),
        (None, 50, 20, 0),
        (200, 500, 0, 200),
        (600, 500, 0, 400),  # a larger setting does not make the host swap
        (0, 500, 0, 0),
        (None, 900, 0, 750),  # three quarters may be page-locked
        (800, 900, 0, 750),
    ],
)
def test_models_never_get_the_tenth_of_the_host_that_keeps_it_from_swapping(
    host_mb: int | None, free_mib: int, held_mib: int, budget_mib: int
) -> None:
    host = HostMemory(1000 * MIB, free_mib * MIB)
    assert HostLimits((GPU,), host_mb).budget_bytes(host, held_mib * MIB) == budget_mib * MIB


@dataclass
class Worker(WorkerSupervisor):
    """Its pages shrink to what it is told."""

    kv_host_bytes: int = 0
    kept: dict[str, KeptPages] = field(default_factory=dict)

    def limit_kv_host(self, num_bytes: int) -> None:
        self.limit_bytes = num_bytes
        self.kv_host_bytes = min(self.kv_host_bytes, num_bytes)


class Host:
    """A host of 1,000 MiB with one GPU and the models that a test puts there."""

    def __init__(self, *models: HostModel, page_mib: int = 0, other_mib: int = 0, host_mb: int | None = None) -> None:
        self.models = {model.model_id: model for model in models}
        self.other_mib = other_mib
        self.worker = Worker(page_mib * MIB)
        self.unloaded: list[str] = []
        pages = KvHostMemory(900, [self.worker], self.read)
        limits = HostLimits((GPU,), host_mb, sleep_mb=900)
        self.budget = HostBudget(limits, lambda: [*self.models.values()], self.unload, pages, self.read)

    def read(self) -> HostMemory:
        held = sum(model.host_bytes for model in self.models.values()) + self.worker.kv_host_bytes
        return HostMemory(1000 * MIB, (1000 - self.other_mib) * MIB - held)

    async def unload(self, model_id: str) -> None:
        self.unloaded.append(model_id)
        del self.models[model_id]


async def test_two_models_at_once_do_not_get_the_same_room() -> None:
    host = Host(host_mb=15)
    admitted = []

    async def sleep(model_id: str) -> None:
        async with host.budget.for_sleep(10 * MIB) as has_room:
            await asyncio.sleep(0)
            if has_room:
                admitted.append(model_id)
                host.models[model_id] = sleeping(model_id, 10 * MIB, 0.0, can_be_unloaded=False)

    await asyncio.gather(sleep("one"), sleep("two"))
    assert admitted == ["one"]
    assert host.worker.limit_bytes == 5 * MIB, "what the model leaves is for the pages of others"


async def test_pages_get_back_what_a_model_took_that_has_woken_or_did_not_fall_asleep() -> None:
    host = Host(host_mb=15)
    host.budget.settle()
    assert not hasattr(host.worker, "limit_bytes"), "none has taken anything"
    async with host.budget.for_sleep(10 * MIB):
        host.budget.settle()
        assert host.worker.limit_bytes == 5 * MIB, "it falls asleep now"
    host.budget.settle()
    assert host.worker.limit_bytes == 15 * MIB, "it did not"
    async with host.budget.for_sleep(10 * MIB):
        host.models["one"] = sleeping("one", 10 * MIB, 0.0)
    host.budget.settle()
    assert host.worker.limit_bytes == 5 * MIB
    host.models.clear()
    host.budget.settle()
    assert host.worker.limit_bytes == 15 * MIB


async def test_sleeping_models_and_pages_give_way_to_the_weights_of_a_load() -> None:
    host = Host(sleeping("old", 300 * MIB, 99.0), sleeping("new", 100 * MIB, 1.0), page_mib=200)
    async with host.budget.for_weights("big", 600 * MIB):
        assert host.unloaded == ["old"]
        assert host.worker.kv_host_bytes <= 200 * MIB
        assert host.worker.limit_bytes == 50 * MIB, "three quarters of the host may be page-locked"
        async with host.budget.for_sleep(101 * MIB) as has_room:
            assert has_room, "another sleeping model gives way to it"
        assert host.unloaded == ["old", "new"]
        async with host.budget.for_sleep(151 * MIB) as has_room:
            assert not has_room, "weights of loaded models give way to nothing"


async def test_load_is_rejected_with_the_bytes_when_the_host_would_swap() -> None:
    host = Host(loaded("other", 400 * MIB), sleeping("waking", 100 * MIB, 9.0, can_be_unloaded=False))
    assert host.budget.free_bytes("big") == 250 * MIB, "three quarters may be page-locked"
    with pytest.raises(InsufficientCapacity, match=r"big needs 401 MiB of host memory .* may take 250 MiB more"):
        async with host.budget.for_weights("big", 401 * MIB):
            pytest.fail("it must not begin")
    async with host.budget.for_weights("big", 250 * MIB):
        pass


async def test_two_loads_do_not_get_the_same_host_memory_and_a_failed_one_gives_it_back() -> None:
    host = Host()
    with contextlib.suppress(ValueError):
        async with host.budget.for_weights("one", 600 * MIB):
            with pytest.raises(InsufficientCapacity):
                await host.budget.for_weights("two", 600 * MIB).__aenter__()
            raise ValueError("the load fails")
    async with host.budget.for_weights("two", 600 * MIB):
        pass


async def test_host_that_runs_short_drops_pages_then_sleeping_models_and_then_says_so() -> None:
    host = Host(loaded("big", 400 * MIB), sleeping("idle", 100 * MIB, 5.0), page_mib=50)
    host.other_mib = 400  # another program: 50 MiB are free
    await host.budget.watch()
    assert host.worker.kv_host_bytes == 0
    assert host.unloaded == []
    await host.budget.watch()
    assert host.unloaded == [], "the reserve is free again"
    host.other_mib = 480
    await host.budget.watch()
    assert host.unloaded == ["idle"]
    assert host.budget.health().shortage is None
    host.other_mib = 550
    await host.budget.watch()
    shortage = host.budget.health().shortage
    assert shortage is not None
    assert "unload one, or end other programs" in shortage
    assert "big" in host.models, "a loaded model is never killed for it"
    host.other_mib = 0
    await host.budget.watch()
    assert host.budget.health().shortage is None


async def test_report_has_each_part_and_what_is_page_locked() -> None:
    host = Host(loaded("big", 200 * MIB), sleeping("idle", 100 * MIB, 5.0), page_mib=50)
    health = host.budget.health()
    assert (health.weight_bytes, health.sleeping_bytes, health.kv_bytes) == (200 * MIB, 100 * MIB, 50 * MIB)
    assert health.budget_bytes == 750 * MIB
    assert health.locked_bytes == 250 * MIB
    assert health.locked_limit_bytes == 750 * MIB
