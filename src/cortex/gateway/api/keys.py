"""`/keys` and `/groups`: list, make, change and revoke API keys, and the limits that groups of them share. Operators
only, but every key may read its own limits and those of its group.

What is made here is in the database: it is in force when the response is sent, and within a second on every other
gateway that shares the database. Keys and groups of the configuration file are listed and cannot be changed here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec

from cortex.gateway.api.parts import ApiRoute, ApiServices, read_body
from cortex.gateway.database import Execute, StoreError
from cortex.gateway.ledger import key_store
from cortex.gateway.ledger.groups import Counters, GroupSection, budget_left, cost_id, group_id
from cortex.gateway.ledger.key_store import KeyConflict
from cortex.gateway.ledger.keys import KeySection, Limit, Money, generate, tenant_name
from cortex.gateway.proxy.routes import json_response
from cortex.http.request import Request
from cortex.http.routing import Route
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.errors import InvalidValue, ManagedByFile, OperatorOnly, RouteNotFound, shorten
from cortex.wire.fields.request_class import RequestClass

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_NAME = 100

_UNSET = msgspec.UNSET
_Rate = Annotated[int, msgspec.Meta(ge=1)]
_Window = Annotated[int, msgspec.Meta(ge=60)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]


class _Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits in a request. An absent limit stays as it is, or gets the default; null removes it."""

    models: tuple[str, ...] | msgspec.UnsetType = _UNSET
    request_class: RequestClass | msgspec.UnsetType | None = _UNSET
    highest_class: RequestClass | msgspec.UnsetType | None = _UNSET
    requests_per_min: _Rate | msgspec.UnsetType | None = _UNSET
    window_tokens: Limit | msgspec.UnsetType | None = _UNSET
    window_s: _Window | msgspec.UnsetType = _UNSET
    balance_tokens: Limit | msgspec.UnsetType | None = _UNSET
    window_cost: Money | msgspec.UnsetType | None = _UNSET
    balance_cost: Money | msgspec.UnsetType | None = _UNSET

    def given(self) -> dict[str, Any]:
        """The fields that the client sent, without the name."""
        values = {field: getattr(self, field) for field in self.__struct_fields__ if field != "name"}
        return {field: value for field, value in values.items() if value is not _UNSET}


class _KeyFields(_Limits, frozen=True, kw_only=True):
    group: str | msgspec.UnsetType | None = _UNSET
    operator: bool | msgspec.UnsetType = _UNSET
    expires: str | msgspec.UnsetType | None = _UNSET


class _NewKey(_KeyFields, frozen=True, kw_only=True):
    name: _Name


class _NewGroup(_Limits, frozen=True, kw_only=True):
    name: _Name


class KeyRoutes:
    """Edits the keys and groups in the database and puts them in force."""

    def __init__(self, api: ApiServices, refresh: Callable[[], Awaitable[None]]) -> None:
        """`refresh` puts in force what the database has. Raises `StoreError`."""
        self._api = api
        self._refresh = refresh

    def routes(self) -> list[ApiRoute]:
        return [
            Route("GET", "/keys", partial(self._list, with_keys=True)),
            Route("POST", "/keys", partial(self._as_operator, self._make, _NewKey)),
            Route("PATCH", "/keys/{name:.+}", partial(self._as_operator, self._change, _KeyFields)),
            Route("DELETE", "/keys/{name:.+}", partial(self._as_operator, self._revoke, None)),
            Route("GET", "/groups", partial(self._list, with_keys=False)),
            Route("POST", "/groups", partial(self._as_operator, self._make_group, _NewGroup)),
            Route("PATCH", "/groups/{name:.+}", partial(self._as_operator, self._change_group, _Limits)),
            Route("DELETE", "/groups/{name:.+}", partial(self._as_operator, self._remove_group, None)),
        ]

    def _as_operator(
        self,
        work: Callable[..., Coroutine[Any, Any, Response]],
        kind: type[_Limits] | None,
        exchange: Exchange,
        /,
        **values: str,
    ) -> Coroutine[Any, Any, Response]:
        """`kind`: what is read from the body and passed to `work`."""
        operator = self._operator(exchange.request)
        given = () if kind is None else (read_body(exchange.request.body, kind),)
        return work(operator, *given, **values)

    def _operator(self, request: Request) -> KeySection:
        """The operator's key. An open gateway rejects this: the first key would lock everybody else out."""
        self._api.authenticate_operator(request)
        key = self._api.metering.meter.key(request)
        if key is None:
            raise OperatorOnly(
                "This gateway has no keys. Make the first one on its host: "
                "`cortex keys add NAME --operator --config cortex.toml`."
            )
        return key

    async def _list(self, exchange: Exchange, *, with_keys: bool) -> Response:
        key = self._api.metering.meter.key(exchange.request)
        in_force, counters = self._api.metering.in_force, await self._counters()
        sees_all = key is None or key.operator
        body: dict[str, Any] = {
            "groups": [
                self._group_json(group, counters, seen_by=None if sees_all else key)
                for group in in_force.groups
                if sees_all or (key is not None and key.group == group.name)
            ],
            "is_open": self._api.metering.is_open,
            "is_operator": sees_all,
        }
        if with_keys:
            shown = [each for each in self._keys() if sees_all or (key is not None and each.id == key.id)]
            body["keys"] = [self._key_json(each, counters) for each in shown]
        return json_response(body)

    async def _make(self, _: KeySection, wanted: _NewKey) -> Response:
        name = self._checked_name(wanted.name, {key.name for key in self._keys()}, "key")
        given = wanted.given()
        self._check_group(given.get("group"))
        try:
            made = generate(name, **given)
        except ValueError as problem:
            raise InvalidValue(f"{problem}.") from problem
        await self._edit(lambda execute: key_store.add_key(execute, made.section))
        return json_response({"key": made.text, **await self._described(made.section)}, 201)

    async def _change(self, operator: KeySection, fields: _KeyFields, name: str) -> Response:
        given, found = fields.given(), self.find(name)
        if operator.id == found.id and ("expires" in given or given.get("operator") is False):
            raise _own_key("change who may use")
        self._check_in_database(found)
        self._check_group(given.get("group"))

        def change(execute: Execute) -> KeySection:
            before = key_store.read_keys(execute).find(found.id)
            if before is None:
                raise _unknown(name)
            after = msgspec.structs.replace(before, **given)
            key_store.put_key(execute, after)
            return after

        try:
            section = await self._edit(change)
        except ValueError as problem:
            raise InvalidValue(f"{problem}.") from problem
        return json_response(await self._described(section))

    async def _revoke(self, operator: KeySection, name: str) -> Response:
        found = self.find(name)
        if operator.id == found.id:
            raise _own_key("revoke")
        self._check_in_database(found)
        if not await self._edit(lambda execute: key_store.remove_key(execute, found.id)):
            raise _unknown(name)
        is_gone = all(key.id != found.id for key in self._keys())
        return json_response({"revoked": {"name": found.name, "id": found.id}, "in_force": is_gone})

    async def _make_group(self, _: KeySection, wanted: _NewGroup) -> Response:
        name = self._checked_name(wanted.name, {group.name for group in self._api.metering.in_force.groups}, "group")
        section = GroupSection(name=name, **wanted.given())
        await self._edit(lambda execute: key_store.put_group(execute, section))
        return json_response(self._group_json(section, await self._counters()), 201)

    async def _change_group(self, _: KeySection, limits: _Limits, name: str) -> Response:
        found, given = self._group_in_database(name), limits.given()

        def change(execute: Execute) -> GroupSection:
            before = next((group for group in key_store.read_keys(execute).groups if group.name == name), found)
            after = msgspec.structs.replace(before, **given)
            key_store.put_group(execute, after)
            return after

        return json_response(self._group_json(await self._edit(change), await self._counters()))

    async def _remove_group(self, _: KeySection, name: str) -> Response:
        found = self._group_in_database(name)
        await self._edit(lambda execute: key_store.remove_group(execute, found.name))
        return json_response({"removed": found.name})

    def _keys(self) -> tuple[KeySection, ...]:
        """Those in force, with the models of their groups."""
        return () if self._api.metering.ledger is None else tuple(self._api.metering.ledger.keyring)

    def find(self, name_or_id: str) -> KeySection:
        """Raises RouteNotFound, and InvalidValue where several keys have the name."""
        keys = self._keys()
        found = [key for key in keys if key.id == name_or_id] or [key for key in keys if key.name == name_or_id]
        if not found:
            raise _unknown(name_or_id)
        if len(found) > 1:
            ids = ", ".join(key.id for key in found)
            raise InvalidValue(f"{len(found)} keys are called {shorten(name_or_id)}; name one by its id: {ids}.")
        return found[0]

    def _checked_name(self, given: str, taken: set[str], kind: str) -> str:
        name = given.strip()
        if not name or not name.isprintable() or "/" in name or name in taken:
            raise InvalidValue(
                f"A {kind} cannot be called {shorten(name)!r}: use printable characters without `/`, and a name that "
                f"no other {kind} has.",
                param="name",
            )
        return name

    def _check_group(self, name: str | None) -> None:
        groups = [group.name for group in self._api.metering.in_force.groups]
        if name is not None and name not in groups:
            known = ", ".join(f"`{group}`" for group in groups) or "none"
            raise InvalidValue(f"There is no group {shorten(name)!r}; groups: {known}.", param="group")

    def _check_in_database(self, key: KeySection) -> None:
        if key.id in self._api.metering.in_force.file_ids:
            raise ManagedByFile(
                f"The key `{key.name}` is in the configuration file, which takes precedence over the database: "
                "change it there, with `cortex keys change` or `cortex keys remove` and `--config`."
            )

    def _group_in_database(self, name: str) -> GroupSection:
        for group in self._api.metering.in_force.groups:
            if group.name == name:
                if name in self._api.metering.in_force.file_groups:
                    raise ManagedByFile(f"The group `{name}` is in the configuration file: change it there.")
                return group
        raise RouteNotFound(f"There is no group {shorten(name)}; GET /groups lists them.")

    async def _edit(self, work: Callable[[Execute], T]) -> T:
        """Edit the database and put the result in force. Raises StoreError, InvalidValue, and what `work`
        raises; then nothing has changed."""
        try:
            result = await self._api.metering.key_store.edit(work)
        except KeyConflict as problem:
            raise InvalidValue(f"Nothing has changed: {problem}.") from problem
        try:
            await self._refresh()
        except StoreError as error:  # the response reports it; the gateway keeps looking for changes
            log.error("keys were changed in the database but are not in force here yet: %s", error)
        return result

    async def _counters(self) -> Mapping[str, Counters]:
        """What keys and groups have spent at all gateways; without the database, what this one knows."""
        ledger = self._api.metering.ledger
        if ledger is None:
            return {}
        try:
            return await ledger.counters()
        except StoreError:
            return ledger.known_counters()

    async def _described(self, section: KeySection) -> dict[str, Any]:
        """The key as it is in force."""
        in_force = next((key for key in self._keys() if key.id == section.id), None)
        return self._key_json(in_force or section, await self._counters()) | {"in_force": in_force is not None}

    def _key_json(self, key: KeySection, counters: Mapping[str, Counters]) -> dict[str, Any]:
        """A key without its hash, and what is left of its limits."""
        public = {name: value for name, value in msgspec.to_builtins(key).items() if name != "sha256"}
        public["tenant"] = tenant_name(key)
        is_file = key.id in self._api.metering.in_force.file_ids
        left = budget_left(key, counters.get(key.id, Counters()), counters.get(cost_id(key), Counters()))
        return (
            public | left | {"is_expired": time.time() >= key.expires_at, "source": "file" if is_file else "database"}
        )

    def _group_json(
        self, group: GroupSection, counters: Mapping[str, Counters], *, seen_by: KeySection | None = None
    ) -> dict[str, Any]:
        """`seen_by`: the key that sees no name of a member but its own; None for operators."""
        is_file = group.name in self._api.metering.in_force.file_groups
        none = Counters()
        left = budget_left(group, counters.get(group_id(group.name), none), counters.get(cost_id(group), none))
        shown = [key for key in self._keys() if key.group == group.name and (seen_by is None or key.id == seen_by.id)]
        members = sorted(key.name for key in shown)
        limits: dict[str, Any] = msgspec.to_builtins(group)
        limits["tenant"] = tenant_name(group.name)
        return limits | left | {"keys": members, "source": "file" if is_file else "database"}


def _own_key(what: str) -> OperatorOnly:
    return OperatorOnly(f"An operator cannot {what} its own key: use another operator's key, or `cortex keys`.")


def _unknown(name_or_id: str) -> RouteNotFound:
    return RouteNotFound(f"There is no key {shorten(name_or_id)}; GET /keys lists them.")
