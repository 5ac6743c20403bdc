"""Carries out the dispatcher's orders on real nodes: each load, unload and recycle is a task."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from cortex.fleet.sleeping import WakeRules
from cortex.fleet.topology import STARTING, ModelOnNode
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.groups import UNLOAD_TIMEOUT_S, start_group, unload_group, wake_group
from cortex.gateway.dispatch.model_jobs import Cause, MemberPlan
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.dispatch.nodes.neighbours import Neighbours
from cortex.gateway.dispatch.nodes.poller import Poller
from cortex.gateway.metrics import Metrics
from cortex.wire.errors import CortexError, InsufficientCapacity, UpstreamUnavailable, shorten
from cortex.wire.node.orders import LoadRequest, UnloadRequest
from cortex.wire.node.protocol import ModelState, ModelStatus

log = logging.getLogger(__name__)

T = TypeVar("T")

RECYCLE_TIMEOUT_S = 60.0
"""Longer than a node waits before it kills a worker that does not exit."""


class NodeEffects:
    """The dispatcher's `Effects` on real nodes. The dispatcher orders each load and unload once."""

    def __init__(
        self,
        nodes: Mapping[str, NodeClient],
        pollers: Mapping[str, Poller],
        metrics: Metrics,
        clock: Callable[[], float],
        neighbours: Neighbours,
    ) -> None:
        self._nodes = nodes
        self._pollers = pollers
        self._metrics = metrics
        self._clock = clock
        self._neighbours = neighbours
        self._tasks: dict[asyncio.Task[None], str] = {}
        self.dispatcher: Dispatcher
        """Gets the outcomes. Set once, before the first order, because the two refer to each other."""

    def load(self, node: str, request: LoadRequest, others: tuple[MemberPlan, ...]) -> None:
        self._metrics.cold_starts.labels(request.model_id, node).inc()
        self._start(node, f"load {request.model_id} on {node}", self._load(node, request, others))

    def unload(self, node: str, request: UnloadRequest, cause: Cause, others: tuple[str, ...]) -> None:
        if cause == "evicted":
            self._metrics.evictions.labels(request.model_id, node).inc()
        self._start(node, f"unload {request.model_id} on {node}", self._unload(node, request, others))

    def forget(self, node: str, model: str) -> None:
        self._start(node, f"forget {model} on {node}", self._forget(node, UnloadRequest(model_id=model, forget=True)))

    def inspect(self, node: str, requests: tuple[LoadRequest, ...]) -> None:
        self._start(node, f"inspect the models of {node}", self._inspect(node, requests))

    def recycle(self, node: str, devices: tuple[int, ...]) -> None:
        self._start(node, f"recycle the workers of {node}", self._recycle(node, devices))

    def suspend(self, node: str) -> None:
        self._start(node, f"suspend {node}", self._suspend(node))

    def wake(self, node: str, rules: WakeRules) -> None:
        self._start("", f"wake {node}", self._wake(node, rules))  # also of a node whose orders are abandoned

    def abandon(self, node: str) -> None:
        for task in [task for task, name in self._tasks.items() if name == node]:
            task.cancel()

    def poll_now(self, node: str) -> None:
        poller = self._pollers.get(node)
        if poller is not None:
            poller.poll_soon()

    def mark_down(self, node: str, *, is_down: bool) -> None:
        if (client := self._nodes.get(node)) is not None:
            client.pool.is_down = is_down

    async def close(self) -> None:
        """Stop waiting for running orders, which nodes complete by themselves."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, node: str, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = node
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (problem := task.exception()) is not None:
            log.error("%s failed unexpectedly", task.get_name(), exc_info=problem)

    async def _load(self, node: str, request: LoadRequest, others: tuple[MemberPlan, ...]) -> None:
        began = self._clock()
        request = self._neighbours.in_load(node, request)
        if others:
            result = await self._load_group((MemberPlan(node, request.devices), *others), request)
        else:
            result = await result_of(lambda: self._nodes[node].load(request))
        if isinstance(result, ModelStatus):
            self._metrics.load_seconds.labels(request.model_id, node).observe(self._clock() - began)
        elif isinstance(result, InsufficientCapacity):
            result = InsufficientCapacity(result.message)
        # The next decision must see the memory that the load took or freed.
        await self._poll(node, *(other.node for other in others))
        self.dispatcher.load_ended(ModelOnNode(node, request.model_id), result)

    async def _load_group(self, members: tuple[MemberPlan, ...], request: LoadRequest) -> ModelStatus | CortexError:
        if request.wake_only:
            result = await result_of(lambda: wake_group(self._nodes, members, request))
            if isinstance(result, ModelStatus | InsufficientCapacity):
                return result
        # If a member was lost during its sleep, the group has ended everywhere.
        start = msgspec.structs.replace(request, wake_only=False)
        return await result_of(lambda: start_group(self._nodes, members, start, self._neighbours))

    async def _unload(self, node: str, request: UnloadRequest, others: tuple[str, ...]) -> None:
        result = await result_of(lambda: unload_group(self._nodes, (node, *others), request))
        await self._poll(node, *others)
        target, error = ModelOnNode(node, request.model_id), result if isinstance(result, CortexError) else None
        is_there = isinstance(result, ModelStatus) and (result.state is ModelState.READY or result.state in STARTING)
        was_reloaded = is_there and request.seen_context_tokens is not None
        self.dispatcher.unload_ended(target, error, was_reloaded=was_reloaded)

    async def _forget(self, node: str, request: UnloadRequest) -> None:
        result = await result_of(lambda: self._nodes[node].unload(request, timeout_s=UNLOAD_TIMEOUT_S))
        if isinstance(result, CortexError):
            log.info("%s still lists %s, which models.toml does not: %s", node, request.model_id, result.message)
        await self._poll(node)

    async def _inspect(self, node: str, requests: tuple[LoadRequest, ...]) -> None:
        for request in requests:
            result = await result_of(partial(self._inspect_one, node, request))
            self.dispatcher.source_inspected(ModelOnNode(node, request.model_id), request.source or "", result)
        self.dispatcher.sources_inspected(node)

    async def _inspect_one(self, node: str, request: LoadRequest) -> ModelStatus:
        return await self._nodes[node].inspect(request)

    async def _recycle(self, node: str, devices: tuple[int, ...]) -> None:
        recycled: list[int] = []
        for index in devices:
            result = await result_of(partial(self._recycle_one, node, index))
            if isinstance(result, CortexError):
                break
            recycled += [index] * result
        await self._poll(node)
        self.dispatcher.recycle_ended(node, result if isinstance(result, CortexError) else tuple(recycled))

    async def _recycle_one(self, node: str, device: int) -> bool:
        return await self._nodes[node].recycle(device, timeout_s=RECYCLE_TIMEOUT_S)

    async def _suspend(self, node: str) -> None:
        result = await result_of(lambda: self._nodes[node].suspend())
        self.dispatcher.suspend_ended(node, result if isinstance(result, CortexError) else None)

    async def _wake(self, node: str, rules: WakeRules) -> None:
        result = await result_of(lambda: wake(rules))
        if isinstance(result, CortexError):
            self.dispatcher.wake_failed(node, result)
        self.poll_now(node)

    async def _poll(self, *nodes: str) -> None:
        await asyncio.gather(*(self._pollers[node].poll() for node in nodes if node in self._pollers))


async def result_of(call: Callable[[], Awaitable[T]]) -> T | CortexError:
    """The result of an order to a node, or its error. Never raises, because the dispatcher waits for the end of every
    order."""
    try:
        return await call()
    except CortexError as error:
        return error
    except Exception as problem:
        log.exception("an order to a node failed unexpectedly")
        return UpstreamUnavailable(f"unexpected {type(problem).__name__}: {problem}")


COMMAND_TIMEOUT_S = 60.0


def magic_packet(mac: str) -> bytes:
    """Six bytes of ones, then the MAC address sixteen times."""
    return b"\xff" * 6 + bytes.fromhex(mac.replace(":", "").replace("-", "")) * 16


async def wake(rules: WakeRules, env: Mapping[str, str] = os.environ) -> None:
    """Returns when the command was sent; the node responds later. Raises UpstreamUnavailable."""
    if rules.mac is not None:
        try:
            send_packet(rules)
        except OSError as problem:
            raise UpstreamUnavailable(f"the Wake-on-LAN packet cannot be sent: {problem}") from problem
        return
    command, added = rules.command, {}
    if rules.ipmi_host is not None:
        user = ("-U", rules.ipmi_user) if rules.ipmi_user else ()
        command = ("ipmitool", "-I", "lanplus", "-H", rules.ipmi_host, *user, "-E", "chassis", "power", "on")
        added = {"IPMI_PASSWORD": env.get(rules.ipmi_password_env or "", "")}
    await _run(command, {**env, **added})


def send_packet(rules: WakeRules) -> None:
    """Raises OSError."""
    assert rules.mac is not None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        out.sendto(magic_packet(rules.mac), (rules.broadcast, rules.port))


async def _run(command: tuple[str, ...], env: Mapping[str, str]) -> None:
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as problem:
        raise UpstreamUnavailable(f"`{command[0]}` cannot be started: {problem}") from problem
    try:
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            _, said = await process.communicate()
    except TimeoutError:
        raise UpstreamUnavailable(f"`{command[0]}` did not end within {COMMAND_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        why = shorten(said.decode("utf-8", "replace").strip())
        raise UpstreamUnavailable(f"`{command[0]}` failed with status {process.returncode}: {why}")
