from __future__ import annotations

from cortex.fleet.topology import Fleet, Node, Residency
from cortex.gateway.metrics import fleet_gauges
from cortex.wire.node.protocol import HostHealth, HostKV, ModelState, ModelStatus


def test_kept_kv_is_counted_of_models_in_any_state_where_there_is_any() -> None:
    kept = {ModelState.COLD: HostKV(num_bytes=5), ModelState.ASLEEP: HostKV(num_bytes=7), ModelState.READY: None}
    statuses = [ModelStatus(id=state.value, state=state, kv_host=held) for state, held in kept.items()]
    node = Node(
        name="beast", healthy=True, residencies={each.id: Residency(status=each, seen_at=0.0) for each in statuses}
    )
    found = [sample for sample in fleet_gauges(Fleet(nodes=(node,)), {}, {}) if "kv_host" in sample.name]
    assert [(sample.labels["model"], sample.value) for sample in found] == [("cold", 5), ("asleep", 7)]


def test_host_memory_is_counted_by_kind_and_weights_of_a_loaded_model_are_not_asleep() -> None:
    statuses = [
        ModelStatus(id="split", state=ModelState.READY, host_bytes=40),
        ModelStatus(id="idle", state=ModelState.ASLEEP, host_bytes=20),
    ]
    node = Node(
        name="beast",
        healthy=True,
        host=HostHealth(
            total_bytes=200, free_bytes=90, budget_bytes=150, weight_bytes=40, sleeping_bytes=20, locked_bytes=60
        ),
        residencies={each.id: Residency(status=each, seen_at=0.0) for each in statuses},
    )
    found = list(fleet_gauges(Fleet(nodes=(node,)), {}, {}))
    kinds = {each.labels["kind"]: each.value for each in found if each.name == "cortex_host_memory_bytes"}
    assert kinds == {"weights": 40, "sleeping": 20, "kv": 0, "locked": 60}
    sizes = {(each.name, each.labels["model"]): each.value for each in found if "model" in each.labels}
    assert sizes["cortex_model_host_bytes", "split"] == 40
    assert sizes["cortex_model_sleeping_bytes", "split"] == 0
    assert sizes["cortex_model_sleeping_bytes", "idle"] == 20
