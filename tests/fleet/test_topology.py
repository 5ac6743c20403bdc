from __future__ import annotations

import msgspec

from cortex.fleet.devices import DeviceState, MemoryReservation
from cortex.fleet.reports import after_missed_poll, after_poll
from cortex.fleet.topology import Abilities, Fleet, ModelOnNode, Node
from cortex.wire.node.protocol import Device, DeviceHealth, Discovery, Health, ModelLoad, ModelState, ModelStatus

DISCOVERY = Discovery(
    host="beast",
    os="linux",
    version="1",
    devices=(Device(index=0, kind="cuda", name="card", total_bytes=1000),),
)


def health(free: int, *models: ModelStatus, status: str = "ok") -> Health:
    devices = (DeviceHealth(index=0, total_bytes=1000, free_bytes=free),)
    return Health(status=status, uptime_s=1, devices=devices, models=models)  # type: ignore[arg-type]


def status(state: ModelState, measured: int | None = 300, **facts: object) -> ModelStatus:
    return ModelStatus(id="m", state=state, devices=(0,), measured_bytes=measured, **facts)  # type: ignore[arg-type]


def test_first_poll_fills_devices_and_models() -> None:
    node = after_poll(
        Node(name="beast"), DISCOVERY, health(600, status(ModelState.READY, idle_s=5, state_age_s=9)), 100.0
    )
    assert node.healthy
    assert node.devices == (
        DeviceState(index=0, kind="cuda", name="card", total_bytes=1000, free_bytes=600, foreign_bytes=100),
    )
    assert (node.residencies["m"].last_used, node.residencies["m"].state_since) == (95.0, 91.0)


def test_memory_of_extra_replicas_is_shown_and_counts_as_free() -> None:
    report = DeviceHealth(index=0, total_bytes=1000, free_bytes=600, extra_replica_bytes=250)
    node = after_poll(Node(name="beast"), DISCOVERY, Health(status="ok", uptime_s=1, devices=(report,), models=()), 1.0)
    assert (node.devices[0].free_bytes, node.devices[0].extra_replica_bytes) == (600, 250)


def test_pages_in_host_memory_are_reported_and_on_a_cpu_no_other_program() -> None:
    report = DeviceHealth(index=0, total_bytes=1000, free_bytes=600, kv_host_bytes=250)
    reported = Health(status="ok", uptime_s=1, devices=(report,), models=())
    for kind, foreign_bytes in (("cuda", 400), ("cpu", 150)):
        device = msgspec.structs.replace(DISCOVERY.devices[0], kind=kind)
        node = after_poll(Node(name="beast"), msgspec.structs.replace(DISCOVERY, devices=(device,)), reported, 1.0)
        assert (node.devices[0].kv_host_bytes, node.devices[0].foreign_bytes) == (250, foreign_bytes)


def test_kept_free_bytes_come_from_reports_and_default_to_zero() -> None:
    report = DeviceHealth(index=0, total_bytes=1000, free_bytes=600, kept_free_bytes=70, kept_free_share=0.5)
    reported = Health(status="ok", uptime_s=1, devices=(report,), models=())
    (device,) = after_poll(Node(name="beast"), DISCOVERY, reported, 1.0).devices
    assert (device.kept_free_bytes, device.kept_free_share) == (70, 0.5)
    (device,) = after_poll(Node(name="beast"), DISCOVERY, health(600), 1.0).devices
    assert (device.kept_free_bytes, device.kept_free_share) == (0, 0.0)


def test_a_node_spans_one_device_per_model_unless_it_reports_more() -> None:
    assert after_poll(Node(name="beast"), DISCOVERY, health(600), 1.0).max_devices_per_model == 1
    wide = msgspec.structs.replace(DISCOVERY, max_devices_per_model=4)
    assert after_poll(Node(name="beast"), wide, health(600), 1.0).max_devices_per_model == 4


def test_foreign_bytes_are_not_measured_during_a_load() -> None:
    node = after_poll(Node(name="beast"), DISCOVERY, health(900), 1.0)
    for free in (900, 750, 620):
        node = after_poll(node, DISCOVERY, health(free, status(ModelState.LOADING, None, estimate_bytes=280)), 2.0)
        assert node.devices[0].foreign_bytes == 100
    node = after_poll(node, DISCOVERY, health(600, status(ModelState.READY)), 3.0)
    assert node.devices[0].foreign_bytes == 100


def test_downloading_model_holds_no_device_memory() -> None:
    node = after_poll(
        Node(name="beast"), DISCOVERY, health(900, status(ModelState.DOWNLOADING, None, estimate_bytes=80)), 1.0
    )
    assert node.devices[0].foreign_bytes == 100


def test_reservations_and_counters_survive_a_poll() -> None:
    reservation = MemoryReservation(model_id="n", devices=(0,), num_bytes=5)
    node = Node(name="beast", reservations=(reservation,), num_loads=7, abilities=Abilities(takes_orders=False))
    again = after_poll(node, DISCOVERY, health(700, status(ModelState.READY)), 2.0)
    assert not again.takes_orders
    assert (again.reservations, again.num_loads) == ((reservation,), 7)


def test_node_stays_healthy_below_the_limit_of_missed_polls() -> None:
    node = after_poll(Node(name="beast"), DISCOVERY, health(700), 1.0)
    node = after_missed_poll(after_missed_poll(node, "timed out", limit=3), "timed out", limit=3)
    assert node.healthy
    node = after_missed_poll(node, "timed out", limit=3)
    assert (node.healthy, node.problem, node.missed_polls) == (False, "timed out", 3)
    back = after_poll(node, DISCOVERY, health(700), 9.0)
    assert (back.healthy, back.problem, back.missed_polls) == (True, None, 0)


def test_replicas_are_ready_models_on_nodes_that_take_requests() -> None:
    ready = health(700, status(ModelState.READY))
    nodes = (
        after_poll(Node(name="good"), DISCOVERY, ready, 1.0),
        after_poll(Node(name="loading"), DISCOVERY, health(700, status(ModelState.LOADING)), 1.0),
        after_poll(Node(name="leaving"), DISCOVERY, health(700, status(ModelState.READY), status="draining"), 1.0),
        after_missed_poll(after_poll(Node(name="dead"), DISCOVERY, ready, 1.0), "gone", limit=1),
    )
    fleet = Fleet(nodes=nodes)
    assert [node.name for node, _ in fleet.replicas("m")] == ["good"]
    assert fleet.live_models() == {"m"}


def test_as_if_idle_forgets_all_requests() -> None:
    busy = status(ModelState.READY, load=ModelLoad(running=3, waiting=1))
    fleet = Fleet(nodes=(after_poll(Node(name="beast"), DISCOVERY, health(700, busy), 1.0),)).with_in_flight(
        {ModelOnNode("beast", "m"): 4}
    )
    assert fleet.nodes[0].residencies["m"].is_busy
    assert not fleet.nodes[0].is_idle
    assert not fleet.as_if_idle().nodes[0].residencies["m"].is_busy
    assert fleet.as_if_idle().nodes[0].is_idle
