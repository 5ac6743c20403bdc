"""The start of a group, with nodes that only note their orders."""

from __future__ import annotations

from typing import cast

import pytest

from cortex.gateway.dispatch.groups import start_group, unload_group
from cortex.gateway.dispatch.model_jobs import MemberPlan
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.wire.errors import UpstreamUnavailable
from cortex.wire.node.groups import PreparedMember, PrepareMember
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState, ModelStatus


class NotedNode:
    """Leaves `fleet` under its name in `leaves` once its member is prepared."""

    def __init__(self, fleet: dict[str, NodeClient], leaves: str | None = None) -> None:
        self._fleet, self._leaves = fleet, leaves
        self.orders: list[str] = []

    async def prepare_member(self, request: PrepareMember) -> PreparedMember:
        self.orders.append(f"prepare {request.model_id}")
        if self._leaves is not None:
            del self._fleet[self._leaves]
        return PreparedMember(host="127.0.0.1", port=1, pulse_port=2)

    async def load(self, request: LoadRequest) -> ModelStatus:
        self.orders.append(f"load {request.model_id}")
        return ModelStatus(id=request.model_id, state=ModelState.READY)

    async def unload(self, request: UnloadRequest, *, timeout_s: float) -> ModelStatus:
        self.orders.append(f"unload {request.model_id}")
        return ModelStatus(id=request.model_id, state=ModelState.COLD)


async def test_group_whose_node_leaves_the_fleet_during_the_start_fails_and_is_ended() -> None:
    fleet: dict[str, NodeClient] = {}
    leader, member = NotedNode(fleet), NotedNode(fleet, leaves="second")
    fleet |= {"first": cast(NodeClient, leader), "second": cast(NodeClient, member)}
    plans = (MemberPlan("first", (0,)), MemberPlan("second", (0,)))
    with pytest.raises(UpstreamUnavailable, match="second"):
        await start_group(fleet, plans, LoadRequest(model_id="m", harness="vllm"))
    assert leader.orders == ["prepare m", "unload m"]


async def test_unload_of_a_group_whose_leader_has_left_the_fleet_fails() -> None:
    with pytest.raises(UpstreamUnavailable, match="first"):
        await unload_group({}, ("first", "second"), UnloadRequest(model_id="m"))
