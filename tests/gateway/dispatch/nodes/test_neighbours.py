"""Which nodes have files that another one needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cortex.fleet.topology import Abilities, Fleet, Node, Residency
from cortex.gateway.dispatch.nodes.neighbours import Neighbours
from cortex.wire.errors import FilesDamaged, SourceNotFound
from cortex.wire.node.protocol import ModelState, ModelStatus

HERE, OTHER = "here", "other"


def holders(**status: Any) -> list[str]:
    """The holders of a model with this status on one other node."""
    held = Residency(status=ModelStatus(id="m", state=ModelState.COLD, **status), seen_at=0.0)
    neuron = Abilities(takes_orders=True)
    nodes = (
        Node(name=HERE, healthy=True, abilities=neuron),
        Node(name=OTHER, healthy=True, abilities=neuron, residencies={"m": held}),
    )
    clients: Any = {name: SimpleNamespace(section=SimpleNamespace(endpoint="http://box")) for name in (HERE, OTHER)}
    return Neighbours(clients, lambda: Fleet(nodes=nodes), is_on=True).holders(HERE, "m", None)


@pytest.mark.parametrize("status", [{"source": "/models/m"}, {"source": "org/m", "disk_bytes": 9}])
def test_node_with_files_is_a_holder(status: dict[str, Any]) -> None:
    assert holders(**status) == [OTHER]


@pytest.mark.parametrize(
    "status",
    [
        {"source": "org/m", "disk_bytes": 0},
        {"source": "/models/m", "reason_code": SourceNotFound.code},
        {"source": "/models/m", "reason_code": FilesDamaged.code},
    ],
)
def test_node_without_usable_files_is_none(status: dict[str, Any]) -> None:
    assert holders(**status) == []
