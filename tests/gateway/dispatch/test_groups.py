"""The start of a group, with nodes that only note their orders."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from cortex.fleet.topology import Fleet
from cortex.gateway.dispatch.groups import start_group, unload_group
from cortex.gateway.dispatch.model_jobs import MemberPlan
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.dispatch.nodes.neighbours import Neighbours
from cortex.wire.errors import CortexError, GroupClaimed, InsufficientCapacity, LoadFailed, UpstreamUnavailable
from cortex.wire.node.groups import PreparedMember, PrepareMember
from cortex.wire.node.orders import FilesRequest, LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState, ModelStatus, PullStatus

from ...waiting import until


class NotedNode:
    """Leaves `fleet` under its name in `leaves` once its member is prepared."""

    def __init__(
        self,
        fleet: dict[str, NodeClient],
        leaves: str | None = None,
        *,
        lacks_files: bool = False,
        sample: str = "same",
        digest: str = "",
        num_claims: int = 0,
        state: ModelState = ModelState.COLD,
    ) -> None:
        """`num_claims`: how often it rejects a claim."""
        self._fleet, self._leaves = fleet, leaves
        self._lacks_files, self._num_claims, self._state = lacks_files, num_claims, state
        self._digests = {"files_sample": sample, "content_digest": digest}
        self.orders: list[str] = []
        self.load_error: CortexError | None = None
        self.before: Callable[[str], Awaitable[None]] | None = None
        """Called with each order that may take long."""

    async def _note(self, order: str) -> None:
        if self.before is not None:
            await self.before(order)
        self.orders.append(order)

    async def prepare_member(self, request: PrepareMember) -> PreparedMember:
        if self._num_claims:
            self._num_claims -= 1
            raise GroupClaimed("another gateway starts it")
        await self._note(f"{'check ports of' if request.reaches else 'prepare'} {request.model_id}")
        if self._leaves is not None:
            del self._fleet[self._leaves]
        digests = {} if self._lacks_files else self._digests
        return PreparedMember(host="127.0.0.1", port=1, pulse_port=2, lacks_files=self._lacks_files, **digests)

    async def pull(self, request: FilesRequest) -> PullStatus:
        self.orders.append(f"pull {request.model_id}")
        self._lacks_files = False
        return PullStatus(model_id=request.model_id, state="done")

    async def model_status(self, model: str) -> ModelStatus:
        return ModelStatus(id=model, state=self._state)

    async def load(self, request: LoadRequest) -> ModelStatus:
        if self.load_error is not None:
            raise self.load_error
        await self._note(f"load {request.model_id}")
        return ModelStatus(id=request.model_id, state=ModelState.READY)

    async def unload(self, request: UnloadRequest, *, timeout_s: float) -> ModelStatus:
        self.orders.append(f"unload {request.model_id}")
        return ModelStatus(id=request.model_id, state=ModelState.COLD)


def no_neighbours(fleet: dict[str, NodeClient]) -> Neighbours:
    return Neighbours(fleet, Fleet, is_on=False)


async def test_group_whose_node_leaves_the_fleet_during_the_start_fails_and_is_ended() -> None:
    fleet: dict[str, NodeClient] = {}
    leader, member = NotedNode(fleet), NotedNode(fleet, leaves="second")
    fleet |= {"first": cast(NodeClient, leader), "second": cast(NodeClient, member)}
    plans = (MemberPlan("first", (0,)), MemberPlan("second", (0,)))
    with pytest.raises(UpstreamUnavailable, match="second"):
        await start_group(fleet, plans, LoadRequest(model_id="m", harness="vllm"), no_neighbours(fleet))
    assert leader.orders == ["prepare m", "check ports of m", "unload m"]


@pytest.mark.parametrize(("failing", "message"), [("a", "it needs 9 GiB"), ("b", "on b: it needs 9 GiB")])
async def test_error_of_a_member_keeps_its_facts_and_has_its_name_unless_it_leads(failing: str, message: str) -> None:
    fleet: dict[str, NodeClient] = {}
    nodes = {name: NotedNode(fleet) for name in "ab"}
    fleet.update(cast("dict[str, NodeClient]", nodes))
    nodes[failing].load_error = InsufficientCapacity("it needs 9 GiB", details={"devices": [{"have_bytes": 5}]})
    request = LoadRequest(model_id="m", harness="h")
    with pytest.raises(InsufficientCapacity) as caught:
        await start_group(fleet, [MemberPlan(name, ()) for name in "ab"], request, no_neighbours(fleet))
    assert (caught.value.message, caught.value.details) == (message, {"devices": [{"have_bytes": 5}]})


async def test_files_come_before_the_load_and_once_from_the_hub() -> None:
    fleet: dict[str, NodeClient] = {}
    noted = {name: NotedNode(fleet, lacks_files=True) for name in ("first", "second", "third")}
    fleet |= {name: cast(NodeClient, node) for name, node in noted.items()}
    plans = tuple(MemberPlan(name, (0,)) for name in fleet)
    await start_group(fleet, plans, LoadRequest(model_id="m", harness="vllm"), no_neighbours(fleet))
    for node in noted.values():
        checks = ["check ports of m"] if node is noted["first"] else []
        assert node.orders == ["prepare m", "pull m", "prepare m", *checks, "load m"]


async def test_claims_are_renewed_while_members_take_long() -> None:
    fleet: dict[str, NodeClient] = {}
    leader, member = NotedNode(fleet), NotedNode(fleet)
    fleet |= {"first": cast(NodeClient, leader), "second": cast(NodeClient, member)}

    async def slow(order: str) -> None:
        """Returns when the leader was asked again."""
        num_orders = len(leader.orders)
        await until(lambda: len(leader.orders) >= num_orders + 2)

    member.before = slow
    plans = (MemberPlan("first", (0,)), MemberPlan("second", (0,)))
    request = LoadRequest(model_id="m", harness="vllm")
    await start_group(fleet, plans, request, no_neighbours(fleet), renew_s=0.01)
    assert member.orders == ["prepare m", "load m"]
    assert set(leader.orders[:-1]) == {"prepare m", "check ports of m"}
    assert leader.orders[-1] == "load m"


@pytest.mark.parametrize("are_read", [False, True])
async def test_members_with_different_files_start_no_group(*, are_read: bool) -> None:
    fleet: dict[str, NodeClient] = {}
    noted = {
        name: NotedNode(fleet, digest=name) if are_read else NotedNode(fleet, sample=name)
        for name in ("first", "second")
    }
    fleet |= {name: cast(NodeClient, node) for name, node in noted.items()}
    plans = tuple(MemberPlan(name, (0,)) for name in fleet)
    with pytest.raises(LoadFailed, match="different files of m: first on first, second on second"):
        await start_group(fleet, plans, LoadRequest(model_id="m", harness="vllm"), no_neighbours(fleet))
    assert [node.orders for node in noted.values()] == [["prepare m", "unload m"]] * 2


@pytest.mark.parametrize("others_end", ["ready", "cold"])
async def test_gateway_waits_for_the_start_of_another_one(others_end: str) -> None:
    fleet: dict[str, NodeClient] = {}
    noted = {name: NotedNode(fleet, num_claims=3, state=ModelState(others_end)) for name in ("first", "second")}
    fleet |= {name: cast(NodeClient, node) for name, node in noted.items()}
    plans = tuple(MemberPlan(name, (0,)) for name in ("second", "first"))
    request = LoadRequest(model_id="m", harness="vllm")
    start = start_group(fleet, plans, request, no_neighbours(fleet), claim_poll_s=0.01)
    if others_end == "ready":
        with pytest.raises(GroupClaimed):
            await start
        assert noted["second"].orders == ["unload m"], "the first by name decides"
    else:
        await start
        assert noted["second"].orders[-1] == "load m"


async def test_unload_of_a_group_whose_leader_has_left_the_fleet_fails() -> None:
    with pytest.raises(UpstreamUnavailable, match="first"):
        await unload_group({}, ("first", "second"), UnloadRequest(model_id="m"))
