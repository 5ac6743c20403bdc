"""The gateway's side of a group, a model that one server runs on several nodes: start, sleep, end and restart.

`fleet/placement/place.py` decides where. A start has five steps: every node prepares its member, which fixes ports and
shows the version of its server and its files; nodes that lack files get them; the leader's node checks that it reaches
all ports; then all members but the leader are loaded, and last the leader, which takes the requests. A prepared member
is a claim: one gateway starts the group, and others wait for it. If any member fails to start, the started ones are
ended. From then on the nodes watch each other (`MemberLink` of a neuron): when one is lost, they end the group, and the
dispatcher has it started again (`LostGroups`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from cortex.fleet.topology import Node
from cortex.gateway.dispatch.model_jobs import MemberPlan
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.dispatch.nodes.neighbours import Neighbours
from cortex.system.tasks import finish_all, run_once
from cortex.wire.error_encoding import from_code
from cortex.wire.errors import CortexError, GroupClaimed, LoadFailed, UpstreamUnavailable
from cortex.wire.node.groups import GroupMember, MemberAddress, PreparedMember, PrepareMember, of_node
from cortex.wire.node.orders import FilesRequest, LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState, ModelStatus

T = TypeVar("T")

END_TIMEOUT_S = 30.0
CLAIM_POLL_S = 1.0
RENEW_S = 30.0
"""Interval at which a claim is renewed during downloads; nodes drop it after their `GroupTimes.hold_s`."""
UNLOAD_TIMEOUT_S = 180.0
"""Time for running requests to end; a node that takes longer is stuck."""


@dataclass(frozen=True, slots=True)
class _Members:
    """The nodes of a group. Errors name their node, except the leader's, whose name is reported with the order
    anyway."""

    nodes: Mapping[str, NodeClient]
    leader: str
    claim_poll_s: float = CLAIM_POLL_S
    renew_s: float = RENEW_S

    async def ask(self, name: str, call: Callable[[NodeClient], Awaitable[T]]) -> T:
        """The result of a call to a node. Raises CortexError."""
        node = self.client(name)
        try:
            return await call(node)
        except CortexError as error:
            raise error.in_words(self.problem_of(name, error.message)) from error

    def problem_of(self, name: str, problem: str) -> str:
        return problem if name == self.leader else of_node(name, problem)

    def client(self, name: str) -> NodeClient:
        """Raises UpstreamUnavailable: a reload may have removed it since the decision."""
        if (node := self.nodes.get(name)) is None:
            raise UpstreamUnavailable(f"{name} is no longer a node of this gateway")
        return node

    @contextlib.asynccontextmanager
    async def renewed(self, renew: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
        """Call it at an interval during the block, which ends when it fails."""

        async def keep() -> None:
            while True:
                await asyncio.sleep(self.renew_s)
                await renew()

        try:
            async with asyncio.TaskGroup() as tasks:
                renewing = tasks.create_task(keep())
                yield
                renewing.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


async def start_group(
    nodes: Mapping[str, NodeClient],
    plans: Sequence[MemberPlan],
    request: LoadRequest,
    neighbours: Neighbours,
    *,
    claim_poll_s: float = CLAIM_POLL_S,
    renew_s: float = RENEW_S,
) -> ModelStatus:
    """`plans`: of all members, the leader's first. Returns its status when all are ready. Raises CortexError; what has
    started is ended then, also when this is cancelled. While another gateway starts the model on these nodes, it waits
    for that; raises GroupClaimed once it is ready there."""
    members = _Members(nodes, plans[0].node, claim_poll_s, renew_s)
    while True:
        try:
            return await _start_once(members, plans, request, neighbours)
        except GroupClaimed:
            await asyncio.sleep(claim_poll_s)
            for plan in plans:
                status = await members.ask(plan.node, lambda node: node.model_status(request.model_id))
                if status.state is ModelState.READY:
                    raise


async def _start_once(
    members: _Members, plans: Sequence[MemberPlan], request: LoadRequest, neighbours: Neighbours
) -> ModelStatus:
    group = secrets.token_hex(16)
    async with _ended_on_failure(members, plans, UnloadRequest(model_id=request.model_id, force=True, group=group)):
        addresses = await _prepared(members, plans, request, group, neighbours)
        requests = [
            msgspec.structs.replace(
                request,
                devices=plan.devices,
                tensor_parallel=max(1, len(plan.devices)),
                member=GroupMember(group=group, rank=rank, members=addresses),
            )
            for rank, plan in enumerate(plans)
        ]
        async with members.renewed(lambda: members.ask(members.leader, _prepare(request, group, 0))):
            await _load_members(members, plans, requests)
        return await members.client(members.leader).load(requests[0])


async def wake_group(nodes: Mapping[str, NodeClient], plans: Sequence[MemberPlan], request: LoadRequest) -> ModelStatus:
    """The leader wakes last, because its server wakes the others. Raises as `start_group` does."""
    members = _Members(nodes, plans[0].node)
    async with _ended_on_failure(members, plans, UnloadRequest(model_id=request.model_id, force=True)):
        waking = msgspec.structs.replace(request, devices=())
        await _load_members(members, plans, [waking] * len(plans))
        return await members.client(members.leader).load(waking)


@contextlib.asynccontextmanager
async def _ended_on_failure(
    members: _Members, plans: Sequence[MemberPlan], request: UnloadRequest
) -> AsyncIterator[None]:
    """A node that does not respond ends its member by itself."""
    try:
        yield
    except BaseException as error:
        present = [members.nodes[plan.node] for plan in plans if plan.node in members.nodes]
        calls = (node.unload(request, timeout_s=END_TIMEOUT_S) for node in present)
        ending = run_once(finish_all(f"ending {request.model_id}", *map(_quietly, calls)), f"end {request.model_id}")
        if isinstance(error, Exception):  # not while it is cancelled
            await ending
        raise


async def _quietly(call: Awaitable[object]) -> None:
    with contextlib.suppress(CortexError):
        await call


async def unload_group(nodes: Mapping[str, NodeClient], names: Sequence[str], request: UnloadRequest) -> ModelStatus:
    """Unload the leader first, after its requests. The others sleep if it does. Raises CortexError."""
    members = _Members(nodes, names[0])
    status = await members.ask(names[0], lambda node: node.unload(request, timeout_s=UNLOAD_TIMEOUT_S))
    is_asleep = status.state is ModelState.ASLEEP
    rest = msgspec.structs.replace(request, sleep=is_asleep, force=True)
    ends = (members.ask(name, lambda node: node.unload(rest, timeout_s=UNLOAD_TIMEOUT_S)) for name in names[1:])
    for outcome in await asyncio.gather(*ends, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, UpstreamUnavailable):
            raise outcome
    return status


async def _prepared(
    members: _Members,
    plans: Sequence[MemberPlan],
    request: LoadRequest,
    group: str,
    neighbours: Neighbours,
) -> tuple[MemberAddress, ...]:
    """The addresses of the members, all of which have their files. Raises CortexError."""
    found = await _claimed(members, plans, request, group)
    _check_versions(plans, found)
    lacking = [plan.node for plan, each in zip(plans, found, strict=True) if each.lacks_files]
    if lacking:
        async with members.renewed(lambda: _claimed(members, plans, request, group)):
            await _fill(members, lacking, request, neighbours)
        found = await _claimed(members, plans, request, group)
    _check_files(plans, found, request.model_id)
    addresses = tuple(
        MemberAddress(node=plan.node, host=each.host, port=each.port, pulse_port=each.pulse_port)
        for plan, each in zip(plans, found, strict=True)
    )
    await members.ask(members.leader, _prepare(request, group, 0, reaches=addresses[1:]))
    return addresses


async def _claimed(
    members: _Members, plans: Sequence[MemberPlan], request: LoadRequest, group: str
) -> list[PreparedMember]:
    """Idempotent. The node whose name sorts first decides between gateways, whoever leads. Raises CortexError, such as
    GroupClaimed."""

    def prepare(rank: int) -> Awaitable[PreparedMember]:
        return members.ask(plans[rank].node, _prepare(request, group, rank))

    first = min(range(len(plans)), key=lambda rank: plans[rank].node)
    decided = await prepare(first)
    others = [rank for rank in range(len(plans)) if rank != first]
    async with members.renewed(lambda: prepare(first)):  # some need long to determine the version of their server
        found = dict(zip(others, await _all(map(prepare, others)), strict=True))
    return [decided if rank == first else found[rank] for rank in range(len(plans))]


def _prepare(
    request: LoadRequest, group: str, rank: int, *, reaches: tuple[MemberAddress, ...] = ()
) -> Callable[[NodeClient], Awaitable[PreparedMember]]:
    files = request.shared_with(PrepareMember)
    asked = PrepareMember(model_id=request.model_id, group=group, rank=rank, reaches=reaches, **files)
    return lambda node: node.prepare_member(asked)


async def _fill(members: _Members, names: Sequence[str], request: LoadRequest, neighbours: Neighbours) -> None:
    """Get the files to these nodes. Without another node that has them, one uses the hub and the others get them from
    it. Raises CortexError."""
    files = FilesRequest(model_id=request.model_id, **request.shared_with(FilesRequest))
    done: list[str] = []
    waiting = list(names)
    if neighbours.is_on and not neighbours.holders(names[0], files.model_id, files.source):
        done.append(waiting.pop(0))
        await _pull(members, done[0], neighbours.in_pull(done[0], files))
    await _all(_pull(members, name, neighbours.in_pull(name, files, done)) for name in waiting)


async def _pull(members: _Members, name: str, files: FilesRequest) -> None:
    """Returns when the node has the files. Cancels the download when it is cancelled. Raises CortexError."""
    status = await members.ask(name, lambda node: node.pull(files))
    try:
        while status.state == "running":
            await asyncio.sleep(members.claim_poll_s)
            status = await members.ask(name, lambda node: node.pull_status(files.model_id))
    except asyncio.CancelledError:
        run_once(_quietly(members.client(name).cancel_pull(files.model_id)), f"cancel the pull on {name}")
        raise
    if status.state != "done":
        raise from_code(status.code or LoadFailed.code, members.problem_of(name, status.reason or status.state))


def _check_files(plans: Sequence[MemberPlan], found: Sequence[PreparedMember], model: str) -> None:
    samples, contents = [each.files_sample for each in found], [each.content_digest for each in found]
    for known in (samples, contents):
        digests = {plan.node: digest for plan, digest in zip(plans, known, strict=True) if digest}
        if len(set(digests.values())) > 1:
            have = ", ".join(f"{digest[:12]} on {node}" for node, digest in digests.items())
            raise LoadFailed(
                f"the nodes of the group have different files of {model}: {have}; copy the same ones to all"
            )


def _check_versions(plans: Sequence[MemberPlan], found: Sequence[PreparedMember]) -> None:
    versions = {plan.node: each.version for plan, each in zip(plans, found, strict=True)}
    if len(set(versions.values())) > 1:
        have = ", ".join(f"{version or 'unknown'} on {node}" for node, version in versions.items())
        raise LoadFailed(f"the nodes of the group have different versions of its server: {have}; install the same one")


async def _load_members(members: _Members, plans: Sequence[MemberPlan], requests: Sequence[LoadRequest]) -> None:
    """Loads all but the leader."""

    def load(request: LoadRequest) -> Callable[[NodeClient], Awaitable[ModelStatus]]:
        return lambda node: node.load(request)

    pairs = list(zip(plans, requests, strict=True))
    await _all(members.ask(plan.node, load(request)) for plan, request in pairs[1:])


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """All results; if a call fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class LostGroups:
    """The groups that ended by themselves and are to be restarted. Owned by the dispatcher."""

    def __init__(self) -> None:
        self.models: set[str] = set()

    def changed(self, before: Node, after: Node) -> None:
        """A node has changed: find groups that it led and lost, or that it leads again."""
        for held in before.active:
            if held.status.nodes and held.state is ModelState.READY and _has_lost(after, held.model_id):
                self.models.add(held.model_id)

    def settle(self, model: str) -> None:
        """It was started, or is no longer wanted."""
        self.models.discard(model)


def _has_lost(node: Node, model: str) -> bool:
    """Whether a model that was ready is not, although no one ordered that."""
    held = node.residencies.get(model)
    if not node.healthy or held is None:
        return True
    is_new = held.status.state_age_s == 0  # the node was restarted
    return held.state in (ModelState.COLD, ModelState.FAILED) and (is_new or held.status.reason is not None)
