"""Prompt caches of nodes: `POST /fleet/forget` deletes them by model, key, group and age. For operators."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from cortex.gateway.api.parts import ApiRoute, ApiServices, read_body
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.ledger.keys import KeySection, PrefixSharing, tenant_name, tenants_of
from cortex.gateway.proxy.routes import json_response
from cortex.http.routing import Route
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.errors import CortexError, InvalidValue, ModelNotFound, NodeNotFound, RouteNotFound, shorten
from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.node.orders import ForgetBlocksRequest, TenantName


class _Forget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Deletes what matches every field that is given."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_MODEL_NAME)] | None = None
    key: str | None = None
    """By its name or id."""
    group: str | None = None
    tenant: TenantName | None = None
    """As `GET /keys` lists it for a key; also for a key that was revoked since."""
    unused_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Only files unused for this long."""
    node: str | None = None
    """Absent: all nodes."""
    everything: bool = False

    def __post_init__(self) -> None:
        if not self.everything and (self.model, self.key, self.group, self.tenant, self.unused_s) == (None,) * 5:
            raise ValueError("name a `model`, `key`, `group`, `tenant` or `unused_s`, or send `everything`: true")


class KeptPromptRoutes:
    """Asks all nodes at once."""

    def __init__(
        self,
        api: ApiServices,
        find_key: Callable[[str], KeySection],
        sharing: Callable[[], PrefixSharing],
    ) -> None:
        self._api = api
        self._find_key = find_key
        self._sharing = sharing

    def routes(self) -> list[ApiRoute]:
        return [Route("POST", "/fleet/forget", self._forget)]

    async def _forget(self, exchange: Exchange) -> Response:
        self._api.authenticate_operator(exchange.request)
        wanted = read_body(exchange.request.body, _Forget)
        order = ForgetBlocksRequest(self._model_id(wanted.model), self._tenants(wanted), wanted.unused_s)
        clients = self._asked(wanted.node)
        return json_response({"nodes": await asyncio.gather(*(self._forgotten(client, order) for client in clients))})

    def _model_id(self, name: str | None) -> str | None:
        try:
            return None if name is None else self._api.dispatcher.resolve(name).model_id
        except ModelNotFound:
            return name  # nodes may keep what they computed with it

    def _tenants(self, wanted: _Forget) -> tuple[str, ...]:
        """Raises InvalidValue."""
        if (wanted.key or wanted.group) and self._sharing() == "all":
            raise InvalidValue(
                "Nodes do not know whose prompts they keep, because `prefix_sharing` is `all`: forget by model or age.",
                param="key" if wanted.key else "group",
            )
        own = () if wanted.key is None else tenants_of(self._key(wanted.key))
        group = () if wanted.group is None else (tenant_name(wanted.group),)
        return (*own, *group, *(() if wanted.tenant is None else (wanted.tenant,)))

    def _key(self, name_or_id: str) -> KeySection:
        try:
            return self._find_key(name_or_id)
        except RouteNotFound as error:
            what = f"There is no key {shorten(name_or_id)}; for a revoked key give its `tenant`"
            raise InvalidValue(f"{what}, which GET /keys listed.", param="key") from error

    def _asked(self, node: str | None) -> list[NodeClient]:
        """Raises NodeNotFound."""
        names = [
            each.name for each in self._api.dispatcher.fleet.nodes if each.takes_orders and node in (None, each.name)
        ]
        if node is not None and not names:
            raise NodeNotFound(f"There is no node {shorten(node)} that loads models.", param="node")
        return [self._api.nodes[name] for name in names if name in self._api.nodes]

    async def _forgotten(self, client: NodeClient, order: ForgetBlocksRequest) -> dict[str, Any]:
        """What was deleted from a node, or why nothing was."""
        try:
            await self._api.awaken(client.name)
            found = await client.forget_blocks(order)
        except CortexError as error:
            return {"node": client.name, "files": 0, "bytes": 0, "error": error.message}
        return {"node": client.name, "files": found.num_files, "bytes": found.num_bytes, "error": None}
