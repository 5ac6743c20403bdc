from __future__ import annotations

from cortex.fleet.topology import Fleet, Node, Residency
from cortex.gateway.metrics import fleet_gauges
from cortex.wire.node.protocol import HostKV, ModelState, ModelStatus


def test_kept_kv_is_counted_of_models_in_any_state_where_there_is_any() -> None:
    kept = {ModelState.COLD: HostKV(num_bytes=5), ModelState.ASLEEP: HostKV(num_bytes=7), ModelState.READY: None}
    statuses = [ModelStatus(id=state.value, state=state, kv_host=held) for state, held in kept.items()]
    node = Node(
        name="beast", healthy=True, residencies={each.id: Residency(status=each, seen_at=0.0) for each in statuses}
    )
    found = [sample for sample in fleet_gauges(Fleet(nodes=(node,)), {}, {}) if "kv_host" in sample.name]
    assert [(sample.labels["model"], sample.value) for sample in found] == [("cold", 5), ("asleep", 7)]
