"""The files of models on the disks of nodes. For operators.

`POST /fleet/pull` downloads without a load, as a job that can be cancelled, also to several nodes: then one of them
uses the hub, and the others get the files from it. `DELETE /fleet/nodes/{node}/files/{model}` deletes.
`GET /fleet/hub/{model}` lists what a repository of the hub offers, and where it would fit.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

from cortex.fleet.known_models import known_repository
from cortex.fleet.memory import may_divide
from cortex.fleet.placement.decision import Verdict
from cortex.fleet.topology import RESERVES, Node
from cortex.gateway.api.jobs import Job, JobBoard
from cortex.gateway.api.live.event_streams import FollowedWork
from cortex.gateway.api.parts import ApiRoute, ApiServices, read_body
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.dispatch.nodes.neighbours import Neighbours
from cortex.gateway.proxy.routes import json_response
from cortex.http.routing import Route, query
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.errors import (
    CortexError,
    HubUnavailable,
    InvalidValue,
    ModelNotFound,
    NodeNotFound,
    UpstreamUnavailable,
    shorten,
)
from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.model_names import check_name
from cortex.wire.node.orders import FilesRequest
from cortex.wire.node.protocol import Progress, PullStatus

PULL_PATH = "/fleet/pull"
_HUB_ID = re.compile(r"(?P<name>[^/@:\s]+/[^/@:\s]+)(?P<revision>@[^:\s]+)?(?::(?P<quant>[\w.-]+))?")


class _Pull(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_MODEL_NAME)]
    """A model of the catalogue, or `owner/name`, also with `:QUANT`."""
    quant: str | None = None
    node: str | None = None
    nodes: Annotated[tuple[str, ...], msgspec.Meta(max_length=256)] = ()
    """Used instead of `node` for several nodes."""
    copy: bool = False
    """Copy the files from other nodes; take nothing from the hub."""


class _Pulls:
    """The downloads of one model to some nodes. Owned by the task that runs `outcomes`."""

    def __init__(
        self, api: ApiServices, clients: Sequence[NodeClient], files: FilesRequest, neighbours: Neighbours
    ) -> None:
        self._api = api
        self._files = files
        self._neighbours = neighbours
        self._clients = clients
        self._done: set[str] = set()
        self._woken: set[str] = set()
        """Nodes that were woken because they have the files."""
        self._following = {client.name: self._follow(client) for client in clients}

    def cancel(self) -> None:
        for each in self._following.values():
            each.cancelled.set()

    def stage(self) -> tuple[str, Progress | None]:
        """The stage of the slowest download, and the bytes of all."""
        found = [each.status.progress for each in self._following.values() if each.status and each.status.progress]
        if not found:
            nodes = [*self._following, *sorted(self._woken - self._following.keys())]
            return self._api.dispatcher.waking_stage(nodes), None
        last = max(found, key=lambda progress: progress.eta_s or 0.0)
        done_bytes = sum(progress.done_bytes or 0 for progress in found)
        total_bytes = sum(progress.total_bytes or 0 for progress in found)
        return last.finest_stage, msgspec.structs.replace(last, done_bytes=done_bytes, total_bytes=total_bytes)

    async def outcomes(self, job: Job) -> None:
        """Report the end on each node to the job. If no other node has the files, one node gets them from the hub
        before the others begin."""
        waiting = list(self._clients)
        offline: list[NodeClient] = []
        while waiting and waiting + offline != waiting[:1] and not self._done and not self._has_holder(waiting[0].name):
            client = waiting.pop(0)
            error = await self._outcome(client)
            if isinstance(error, HubUnavailable) and not self._following[client.name].cancelled.is_set():
                self._following[client.name] = self._follow(client)
                offline.append(client)
            else:
                job.node_ended(client.name, error)
                if self._following[client.name].cancelled.is_set():
                    job.end(error)
                    return
        await asyncio.gather(*(self._report(client, job) for client in (*waiting, *offline)))

    def _has_holder(self, node: str) -> bool:
        return not self._neighbours.is_on or bool(
            self._neighbours.holders(node, self._files.model_id, self._files.source)
        )

    async def _report(self, client: NodeClient, job: Job) -> None:
        job.node_ended(client.name, await self._outcome(client))

    async def _outcome(self, client: NodeClient) -> CortexError | None:
        error = await self._following[client.name].outcome()
        if error is None:
            self._done.add(client.name)
        return error

    def _follow(self, client: NodeClient) -> FollowedWork[PullStatus]:
        return FollowedWork(
            lambda: client.pull(self._neighbours.in_pull(client.name, self._files, self._done)),
            lambda: client.pull_status(self._files.model_id),
            lambda: client.cancel_pull(self._files.model_id),
            described=f"the download on {client.name}",
            after_restart=f"{client.name} has restarted; pull again to continue the download.",
            prepare=lambda: self._prepare(client.name),
        )

    async def _prepare(self, node: str) -> None:
        """Wake the node, and for a copy also one that has the files, if all those sleep."""
        sleeping: list[str] = []
        if not self._files.uses_hub and not self._done and not self._has_holder(node):
            sleeping = self._neighbours.holders(node, self._files.model_id, self._files.source, asleep=True)[:1]
            self._woken.update(sleeping)
        await self._api.awaken(node, *sleeping)


class FileRoutes:
    """Follows each pull to its end, as a job."""

    def __init__(self, api: ApiServices, neighbours: Neighbours, board: JobBoard) -> None:
        self._api = api
        self._neighbours = neighbours
        self._board = board

    def routes(self) -> list[ApiRoute]:
        return [
            Route("POST", PULL_PATH, self._begin_pull),
            Route("GET", "/fleet/hub/{source:.+}", self._offer),
            Route("DELETE", "/fleet/nodes/{node}/files/{model:.+}", self._delete),
        ]

    def _begin_pull(self, exchange: Exchange) -> Response:
        by = self._api.authenticate_operator(exchange.request)
        return json_response({"job": self._pull(read_body(exchange.request.body, _Pull), by).as_json()}, 202)

    async def _delete(self, exchange: Exchange, node: str, model: str) -> Response:
        self._api.authenticate_operator(exchange.request)
        return json_response(await self.delete(node, model, query(exchange.request, "quant")))

    async def _offer(self, exchange: Exchange, source: str) -> Response:
        """The quantisations in a repository, with their sizes and where each would fit."""
        self._api.authenticate_operator(exchange.request)
        files = self.source_of(source)
        client = self._client(query(exchange.request, "node") or self._choose_node(files.model_id))
        self._api.check_awake(client.name)
        try:
            found = await client.hub_repository(files.source or files.model_id)
        except CortexError as error:
            raise error.in_words(f"{client.name}: {error.message}") from error
        variants = [
            {
                "quant": variant.quant,
                "bytes": variant.num_bytes,
                "num_files": variant.num_files,
                "nodes": self._places(f"{found.repository}:{variant.quant}", variant.num_bytes),
            }
            for variant in found.variants
        ]
        return json_response(
            {"repository": found.repository, "commit": found.commit, "asked": client.name, "variants": variants}
        )

    def _places(self, name: str, num_bytes: int) -> list[dict[str, Any]]:
        """The verdict of every node that loads models, by the size of the weights alone."""
        by_name = {node.name: node for node in self._api.dispatcher.fleet.nodes if node.takes_orders}
        decision = self._api.dispatcher.explain_new(name, num_bytes)
        return [
            {
                "node": each.node,
                "verdict": str(each.verdict),
                "reason": each.reason,
                "fits_with_host": each.verdict is Verdict.TOO_SMALL and may_divide(by_name[each.node], num_bytes),
                "fits_on_disk": (disk := by_name[each.node].disk) is None or disk.free_bytes > num_bytes,
            }
            for each in decision.assessments
            if each.node in by_name
        ]

    @property
    def are_shared(self) -> bool:
        """Whether nodes get files from each other."""
        return self._neighbours.is_on

    def pull(self, model: str, by: str) -> Job:
        """Download `model`, also `MODEL:QUANT`, to the node that suits it. Raises CortexError."""
        return self._pull(_Pull(model=model), by)

    async def delete(self, node: str, model: str, quant: str | None) -> dict[str, Any]:
        """Delete the files of a model from a node, or one quantisation of them. Raises CortexError."""
        client = self._client(node)
        await self._api.awaken(client.name)
        deleted = await client.delete_files(FilesRequest(model_id=model, quant=quant))
        return {"node": client.name, "model": deleted.model_id, "freed_bytes": deleted.freed_bytes}

    def _pull(self, wanted: _Pull, by: str) -> Job:
        files = self._files(wanted)
        names = wanted.nodes or (wanted.node or self._choose_node(files.model_id),)
        clients = [self._client(name) for name in dict.fromkeys(names)]
        if wanted.copy:
            self._check_copies(clients, files)
        pulls = _Pulls(self._api, clients, files, self._neighbours)
        job = self._board.start(
            "pull",
            files.model_id if files.quant is None else f"{files.model_id}:{files.quant}",
            [client.name for client in clients],
            by=by,
            awaited=[client.name for client in clients],
            read_stage=pulls.stage,
            cancel=pulls.cancel,
        )
        self._api.tasks.start(pulls.outcomes(job), f"pull {files.model_id}")
        return job

    def source_of(self, name: str) -> FilesRequest:
        """The files that a name stands for: a model of this gateway, or of the hub. Raises ModelNotFound."""
        return self._files(_Pull(model=name))

    def _check_copies(self, clients: Sequence[NodeClient], files: FilesRequest) -> None:
        """Raises InvalidValue or ModelNotFound."""
        if not self._neighbours.is_on:
            raise InvalidValue("Nodes do not share files: set `share_files` of [gateway] to true.", param="copy")
        for client in clients:
            has_files = partial(self._neighbours.holders, client.name, files.model_id, files.source)
            if not has_files() and not has_files(asleep=True):
                what = f"No other node that {client.name} can reach has files of {shorten(files.model_id)}"
                raise ModelNotFound(f"{what}; pull it instead.", param="model")

    def _files(self, wanted: _Pull) -> FilesRequest:
        """What to download: a model with its source, a hub id, or a name that stands for one. Raises ModelNotFound."""
        try:
            spec = self._api.dispatcher.resolve(wanted.model).spec
        except ModelNotFound:
            check_name(wanted.model, "model")
            match = _HUB_ID.fullmatch(known_repository(wanted.model) or wanted.model)
            if match is None:
                what = f"{shorten(wanted.model)} is neither a model of this gateway nor a repository of the hub"
                raise ModelNotFound(f"{what}, whose names are OWNER/NAME.", param="model") from None
            quant = wanted.quant or match["quant"]
            source = match["name"] + (match["revision"] or "")
            return FilesRequest(model_id=match["name"], source=source, quant=quant, uses_hub=not wanted.copy)
        files = spec.shared_with(FilesRequest) | {"quant": wanted.quant or spec.quant}
        return FilesRequest(model_id=spec.id, uses_hub=not wanted.copy, **files)

    def _choose_node(self, model: str) -> str:
        """The node where the model would be loaded; where that is not known, the one with the most free disk."""
        decision = self._api.dispatcher.explain(model, "operator")
        return decision.node if decision.node is not None else self.roomiest_node()

    def roomiest_node(self) -> str:
        """The node with the most free disk, awake if possible. Raises UpstreamUnavailable."""

        def free_bytes(node: Node) -> int:
            return node.disk.free_bytes if node.disk is not None else 0

        nodes = [node for node in self._api.dispatcher.fleet.nodes if node.takes_orders]
        candidates = [node for node in nodes if node.healthy] or [node for node in nodes if node.sleep in RESERVES]
        if not candidates:
            raise UpstreamUnavailable("No node that downloads models is up.")
        return max(candidates, key=lambda node: (not node.draining, free_bytes(node))).name

    def _client(self, name: str) -> NodeClient:
        client = self._api.nodes.get(name)
        node = self._api.dispatcher.fleet.node(name)
        if client is None or node is None or not node.takes_orders:
            known = ", ".join(node.name for node in self._api.dispatcher.fleet.nodes if node.takes_orders) or "none"
            raise NodeNotFound(f"There is no node {shorten(name)} that keeps files; there are: {known}.", param="node")
        return client
