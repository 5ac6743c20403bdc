"""Which nodes have files that another one needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cortex.fleet.topology import Abilities, Fleet, Node, Residency
from cortex.gateway.dispatch.nodes.neighbours import Neighbours
from cortex.wire.errors import FilesDamaged, ModelUnsupported, SourceNotFound
from cortex.wire.node.neighbours import MAX_NEIGHBOURS, Neighbour, repository_of
from cortex.wire.node.orders import FilesRequest
from cortex.wire.node.protocol import ModelState, ModelStatus

HERE, OTHER, THIRD = "here", "other", "third"


class _Client:
    """What is asked of the client of a node."""

    section = SimpleNamespace(endpoint="http://box")

    def __init__(self, name: str) -> None:
        self._name = name

    def as_neighbour(self, repository: str) -> Neighbour:
        return Neighbour(name=self._name, url=f"http://box/{repository}")


def neighbours(**statuses: dict[str, Any]) -> Neighbours:
    """Of a fleet in which the model has these statuses on other nodes."""
    neuron, cold = Abilities(takes_orders=True), ModelState.COLD
    nodes = [Node(name=HERE, healthy=True, abilities=neuron)]
    for name, status in statuses.items():
        held = Residency(status=ModelStatus(id="m", state=cold, **status), seen_at=0.0)
        nodes.append(Node(name=name, healthy=True, abilities=neuron, residencies={"m": held}))
    clients: Any = {name: _Client(name) for name in (HERE, *statuses)}
    return Neighbours(clients, lambda: Fleet(nodes=tuple(nodes)), is_on=True)


def holders(**status: Any) -> list[str]:
    """The holders of a model with this status on one other node."""
    return neighbours(**{OTHER: status}).holders(HERE, "m", None)


def asked(**statuses: dict[str, Any]) -> list[str]:
    """The nodes that a node asks for the files."""
    order = neighbours(**statuses).in_pull(HERE, FilesRequest(model_id="m", source="/models/m"))
    return [each.name for each in order.neighbours]


@pytest.mark.parametrize(
    "status",
    [
        {"source": "/models/m"},
        {"source": "/models/m", "reason_code": ModelUnsupported.code},
        {"source": "org/m", "disk_bytes": 9},
    ],
)
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


COPY = {"source": repository_of("/models/m"), "disk_bytes": 9}
MISSING = {"source": "/models/m", "reason_code": SourceNotFound.code}


def test_node_with_the_path_is_asked_before_those_with_a_copy_which_may_be_older() -> None:
    assert asked(other=COPY, third={"source": "/models/m"}) == [THIRD, OTHER]
    assert asked(other=COPY, third=MISSING) == [THIRD, OTHER], "its files may be there again"
    assert asked(third=MISSING) == []
    assert asked(other=COPY, third={"source": "/models/m", "reason_code": FilesDamaged.code}) == [OTHER]


def test_nodes_whose_files_are_missing_do_not_take_the_place_of_one_with_a_copy() -> None:
    missing = {f"missing{at}": MISSING for at in range(MAX_NEIGHBOURS)}
    found = asked(**missing, other=COPY)
    assert found == [*list(missing)[:-1], OTHER]
