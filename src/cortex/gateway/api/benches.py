"""`POST /fleet/models/{model}/bench`: measures how fast a model is on its nodes, as a job. For operators.

The model is measured where it is ready, on all nodes at once; where it is ready nowhere, it is loaded first. Nodes keep
the results and report them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from cortex.fleet.topology import ModelOnNode
from cortex.gateway.api.jobs import Job, JobBoard
from cortex.gateway.api.live.event_streams import FollowedWork
from cortex.gateway.api.parts import ApiRoute, ApiServices, read_body
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.dispatch.operator.commands import OperatorCommands
from cortex.gateway.proxy.routes import json_response
from cortex.http.routing import Route
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.errors import CortexError, ModelUnsupported
from cortex.wire.node.bench import BenchRequest, BenchStatus
from cortex.wire.node.protocol import Progress


class _BenchOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str | None = None
    force: bool = False
    reload: bool = True
    wait: bool = True
    """Respond when everything is measured; otherwise at once, with the job."""


class BenchRoutes:
    """Follows each measurement to its end, as a job."""

    def __init__(self, api: ApiServices, operator: OperatorCommands, board: JobBoard) -> None:
        self._api = api
        self._operator = operator
        self._board = board

    def routes(self) -> list[ApiRoute]:
        return [Route("POST", "/fleet/models/{name:.+}/bench", self._begin)]

    def _begin(self, exchange: Exchange, name: str) -> Response | None:
        request = exchange.request
        by = self._api.authenticate_operator(request)
        order = read_body(request.body, _BenchOrder)
        model = self._api.dispatcher.resolve(name).model_id
        job = self._start(model, order, by)
        if not order.wait:
            return json_response({"model": job.model, "nodes": job.nodes, "job": job.as_json()}, 202)
        job.on_end(lambda: exchange.respond(*job.response()))
        return None

    def _start(self, model: str, order: _BenchOrder, by: str) -> Job:
        asleep = self._operator.sleepers_for(model, order.node)
        runs = [] if asleep else self._runs(model, order)

        def stage() -> tuple[str, Progress | None]:
            if not runs:
                return self._api.dispatcher.waking_stage(asleep), None
            return next((run.stage for run in runs if not run.has_ended), "starting"), None

        def cancel() -> None:
            for run in runs:
                run.cancel()
            if not runs:
                job.end(None)

        names = asleep or [run.node for run in runs]
        job = self._board.start("bench", model, names, by=by, awaited=names, read_stage=stage, cancel=cancel)
        self._api.tasks.start(self._measure(job, asleep, runs, order), f"measure {model}")
        return job

    async def _measure(self, job: Job, asleep: Sequence[str], runs: list[_NodeRun], order: _BenchOrder) -> None:
        """Ends the job. `runs` is filled once the nodes are awake."""
        try:
            await self._api.awaken(*asleep)
            if job.ended_at is not None:
                return
            runs[:] = runs or self._runs(job.model, order)
        except CortexError as error:
            job.end(error)
            return
        names = [run.node for run in runs]
        job.move(names, names)
        await asyncio.gather(*(run.run(job) for run in runs))

    def _runs(self, model: str, order: _BenchOrder) -> list[_NodeRun]:
        request = BenchRequest(model_id=model, force=order.force, reload=order.reload)
        targets = self._targets(model, order.node)
        return [_NodeRun(self._api.dispatcher, self._api.nodes[target.node], target, request) for target in targets]

    def _targets(self, model: str, node: str | None) -> list[ModelOnNode]:
        """Where the model is ready, else where it is being loaded from now on. Raises CortexError."""
        self._api.dispatcher.check_node(node)
        ready = [here for here, _ in self._api.dispatcher.fleet.replicas(model) if node in (None, here.name)]
        if ready:
            own = [ModelOnNode(here.name, model) for here in ready if here.takes_orders]
            if not own:
                names = ", ".join(here.name for here in ready)
                raise ModelUnsupported(f"{model} is served by {names}, which is not a neuron: it cannot be measured.")
            return own
        chosen = self._operator.load(model, node).node
        assert chosen is not None, "a load that is not rejected has a node"
        return [ModelOnNode(chosen, model)]


class _NodeRun:
    """The measurement on one node, after the load that it may need."""

    def __init__(self, dispatcher: Dispatcher, client: NodeClient, target: ModelOnNode, request: BenchRequest) -> None:
        self.node = target.node
        self.has_ended = False
        self._dispatcher = dispatcher
        self._target = target
        self._following: FollowedWork[BenchStatus] = FollowedWork(
            lambda: client.bench(request),
            lambda: client.bench_status(request.model_id),
            lambda: client.cancel_bench(request.model_id),
            described=f"the measurement on {client.name}",
            after_restart=f"{client.name} has restarted; measure again.",
        )
        self._is_loading = False

    @property
    def stage(self) -> str:
        if self._is_loading:
            return "loading"
        return self._following.status.stage if self._following.status is not None else "starting"

    def cancel(self) -> None:
        self._following.cancelled.set()
        if self._is_loading:
            self._dispatcher.cancel_load(self._target)

    async def run(self, job: Job) -> None:
        """Reports the result, or why there is none, to the job."""
        error = await self._loaded() or await self._following.outcome()
        self.has_ended = True
        if error is None and self._following.status is not None:
            job.results[self.node] = msgspec.to_builtins(self._following.status.result)
        job.node_ended(self.node, error)

    async def _loaded(self) -> CortexError | None:
        """Why the model is not ready there."""
        if self._dispatcher.is_ready(self._target.model, self._target.node):
            return None
        ended: asyncio.Future[CortexError | None] = asyncio.get_running_loop().create_future()
        self._dispatcher.watch(self._target, "load", partial(_end, ended))
        self._is_loading = True
        error = await ended
        self._is_loading = False
        return error


def _end(ended: asyncio.Future[CortexError | None], error: CortexError | None) -> None:
    if not ended.done():  # the gateway may be closing
        ended.set_result(error)
