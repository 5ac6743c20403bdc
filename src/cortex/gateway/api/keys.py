"""`/keys`: list, make, change and revoke API keys. Operators only, but every key may read its own limits.

The keys are those of the configuration file, which `cortex keys` edits as well; an edit is in force when the response
is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from cortex.gateway.api.parts import ApiRoute, DeferredResponses, read_body
from cortex.gateway.ledger.groups import CostLeft
from cortex.gateway.ledger.key_file import KeyFile, KeyFileError, UnknownKey
from cortex.gateway.ledger.keys import KeySection, Limit, Money, generate
from cortex.gateway.ledger.limits import Account
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.proxy.routes import json_response
from cortex.http.request import Request
from cortex.http.routing import Route
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.settings import SettingsError
from cortex.wire.errors import CortexError, InvalidValue, OperatorOnly, RouteNotFound, shorten
from cortex.wire.words import os_error_in_words

T = TypeVar("T")

PATH = "/keys"
MAX_NAME = 100

_UNSET = msgspec.UNSET
_Rate = Annotated[int, msgspec.Meta(ge=1)]
_Window = Annotated[int, msgspec.Meta(ge=60)]


class _Fields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a key in a request. Absent: as it is, or the default; null: without this limit."""

    models: tuple[str, ...] | msgspec.UnsetType = _UNSET
    requests_per_min: _Rate | msgspec.UnsetType | None = _UNSET
    window_tokens: Limit | msgspec.UnsetType | None = _UNSET
    window_s: _Window | msgspec.UnsetType = _UNSET
    balance_tokens: Limit | msgspec.UnsetType | None = _UNSET
    window_cost: Money | msgspec.UnsetType | None = _UNSET
    balance_cost: Money | msgspec.UnsetType | None = _UNSET
    group: str | msgspec.UnsetType | None = _UNSET
    operator: bool | msgspec.UnsetType = _UNSET
    expires: str | msgspec.UnsetType | None = _UNSET

    def given(self) -> dict[str, Any]:
        """The fields that the client sent."""
        values = {field: getattr(self, field) for field in self.__struct_fields__}
        return {field: value for field, value in values.items() if value is not _UNSET}


class _NewKey(_Fields, frozen=True, kw_only=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]


class KeyRoutes:
    """Edits the keys in the configuration file and puts them in force."""

    def __init__(
        self,
        metering: Metering,
        path: Path | None,
        reload: Callable[[], Awaitable[None]],
        deferred: DeferredResponses,
    ) -> None:
        """`path`: the configuration file, if there is one. `reload` puts it in force and never raises."""
        self._metering = metering
        self._path = path
        self._reload = reload
        self._deferred = deferred

    def routes(self) -> list[ApiRoute]:
        return [Route("GET POST", PATH, self._handle), Route("PATCH DELETE", f"{PATH}/(?P<name>.+)", self._handle)]

    def _handle(self, exchange: Exchange, name: str = "") -> Response | None:
        request = exchange.request
        if request.method in (b"GET", b"HEAD"):
            return self._list(request)
        operator = self._operator(request)
        if request.method == b"POST":
            work = self._make(read_body(request.body, _NewKey))
        elif request.method == b"PATCH":
            work = self._change(operator, name, read_body(request.body, _Fields))
        else:
            work = self._revoke(operator, name)
        self._deferred.respond(exchange, work)
        return None

    def _list(self, request: Request) -> Response:
        key = self._metering.meter.key(request)
        ledger, now = self._metering.ledger, time.time()
        accounts = [] if ledger is None else ledger.accounts
        shown = [account for account in accounts if key is None or key.operator or account.key.id == key.id]
        return json_response(
            {
                "keys": [self._account_json(account, now) for account in shown],
                "is_open": self._metering.is_open,
                "is_operator": key is None or key.operator,
            }
        )

    def _operator(self, request: Request) -> KeySection:
        """The operator's key. On an open gateway nobody may make keys here: the first one would lock all others out."""
        self._metering.meter.authenticate_operator(request)
        key = self._metering.meter.key(request)
        if key is None:
            raise OperatorOnly(
                "This gateway has no keys. Make the first one on its host: "
                "`cortex keys add NAME --operator --config cortex.toml`."
            )
        return key

    async def _make(self, wanted: _NewKey) -> Response:
        name = wanted.name.strip()
        if not name or "/" in name or any(account.key.name == name for account in self._accounts()):
            raise InvalidValue(
                f"A key cannot be called {shorten(name)!r}: use a name without `/` that no other key has.", param="name"
            )
        given = {field: value for field, value in wanted.given().items() if field != "name"}
        try:
            made = generate(name, **given)
        except ValueError as problem:
            raise InvalidValue(f"{problem}.") from problem
        await self._edit(lambda file: file.add(made.section))
        return json_response({"key": made.text, **self._described(made.section)}, 201)

    async def _change(self, operator: KeySection, name: str, fields: _Fields) -> Response:
        given = fields.given()
        if operator.id == self._find(name).id and ("expires" in given or given.get("operator") is False):
            raise _own_key("change who may use")

        def changed(section: KeySection) -> KeySection:
            return msgspec.structs.replace(section, **given)

        try:
            section = await self._edit(lambda file: file.change(name, changed))
        except ValueError as problem:
            raise InvalidValue(f"{problem}.") from problem
        return json_response(self._described(section))

    async def _revoke(self, operator: KeySection, name: str) -> Response:
        if operator.id == self._find(name).id:
            raise _own_key("revoke")
        section, _ = await self._edit(lambda file: file.remove(name))
        return json_response({"revoked": {"name": section.name, "id": section.id}})

    def _accounts(self) -> tuple[Account, ...]:
        return self._metering.ledger.accounts if self._metering.ledger is not None else ()

    def _find(self, name_or_id: str) -> KeySection:
        for account in self._accounts():
            if name_or_id in (account.key.id, account.key.name):
                return account.key
        raise RouteNotFound(f"There is no key {shorten(name_or_id)}; GET /keys lists them.")

    async def _edit(self, edit: Callable[[KeyFile], T]) -> T:
        """Edit the file on a thread and put it in force. Raises InvalidValue, RouteNotFound or CortexError."""
        if self._path is None:
            raise CortexError("This gateway runs without a configuration file, so keys cannot be stored.")
        try:
            result = await asyncio.to_thread(partial(edit, KeyFile(self._path)))
        except UnknownKey as problem:
            raise RouteNotFound(f"{problem}.") from problem
        except OSError as problem:
            raise CortexError(f"The keys were not changed: {os_error_in_words(problem)}.") from problem
        except (KeyFileError, SettingsError) as problem:
            raise CortexError(f"The keys were not changed: {problem}.") from problem
        await self._reload()
        return result

    def _described(self, section: KeySection) -> dict[str, Any]:
        """The key as it is in force; with its limits only when the file could not be put in force."""
        for account in self._accounts():
            # Its models may be those of its group.
            if msgspec.structs.replace(account.key, models=section.models) == section:
                return self._account_json(account, time.time()) | {"in_force": True}
        return _public(section) | {"in_force": False}

    def _account_json(self, account: Account, now: float) -> dict[str, Any]:
        key, ledger = account.key, self._metering.ledger
        spent, in_window = account.total_spent(), account.window_spent(now)
        costs = () if ledger is None else (each for budget, each in ledger.budgets(key) if budget.owns(key))
        left = next((CostLeft.of(key, each.window_spent(now), each.total_spent()) for each in costs), CostLeft())
        return _public(key) | {
            "is_expired": now >= key.expires_at,
            "spent_tokens": spent,
            "window_spent_tokens": in_window,
            "balance_left_tokens": None if key.balance_tokens is None else max(0, key.balance_tokens - spent),
            "window_left_tokens": None if key.window_tokens is None else max(0, key.window_tokens - in_window),
            "balance_left_cost": left.balance,
            "window_left_cost": left.window,
        }


def _own_key(what: str) -> OperatorOnly:
    return OperatorOnly(f"An operator cannot {what} its own key: use another operator's key, or `cortex keys`.")


def _public(key: KeySection) -> dict[str, Any]:
    """A key without its hash."""
    return {name: value for name, value in msgspec.to_builtins(key).items() if name != "sha256"}
