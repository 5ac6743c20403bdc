"""`/session/…`: the available ways to sign in, the two steps of OpenID Connect in the browser, and stored
conversations. Sign-ins, by key and through a provider: the limit of failures per address, and audit records."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from msgspec.structs import replace

from cortex.gateway.dispatch.operator.audit import AuditLog
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.ledger.sessions import COOKIE, LIFETIME_S, Sessions
from cortex.gateway.ledger.users import SignInSection
from cortex.gateway.page.conversations import Conversations
from cortex.gateway.page.openid import FLOW_S, Flow, OpenIDClient
from cortex.gateway.proxy.deferred_responses import DeferredResponses
from cortex.gateway.proxy.listener import SIGN_IN_CALLBACK, SIGN_IN_METHODS, SIGN_IN_START
from cortex.gateway.proxy.routes import HttpRoute, json_response
from cortex.http.limits import network_of
from cortex.http.request import Request
from cortex.http.routing import Route, routed_path
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.errors import CortexError, InvalidAPIKey, RateLimitExceeded, RouteNotFound

log = logging.getLogger(__name__)

MOST_FAILURES = 20
"""Higher than typing errors reach, even behind a proxy, where all people share one address."""
WINDOW_S = 60.0
MOST_ADDRESSES = 10_000
"""Networks whose failures are remembered; the oldest are forgotten first."""


class FailedSignIns:
    """The recent failures of each address; an IPv6 /64 network counts as one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """When the window of a network began, and its failures since."""

    def check(self, address: str) -> None:
        """Raises RateLimitExceeded for an address that failed too often."""
        began, num_failures = self._failures.get(network_of(address), (0.0, 0))
        left_s = began + WINDOW_S - self._clock()
        if num_failures >= MOST_FAILURES and left_s > 0:
            raise RateLimitExceeded(
                f"{num_failures} sign-ins from this address failed; try again in {math.ceil(left_s)} s.",
                retry_after_s=left_s,
            )

    def failed(self, address: str) -> None:
        """Count a failure."""
        now, network = self._clock(), network_of(address)
        began, num_failures = self._failures.pop(network, (now, 0))
        if now - began >= WINDOW_S:
            began, num_failures = now, 0
        self._failures[network] = (began, num_failures + 1)
        if len(self._failures) > MOST_ADDRESSES:
            self._failures.popitem(last=False)


ONCE_IN_S = 60.0
"""Repeats from the same network within this time are not recorded."""
MOST_RECORDED = 10_000
"""Number of records remembered for that; the oldest are dropped first."""


class SignInAttempts:
    """Counts and records attempts. The client's input is never recorded: it contains keys, codes and tokens."""

    def __init__(self, audit: AuditLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._audit = audit
        self._clock = clock
        self._failures = FailedSignIns(clock)
        self._recorded: OrderedDict[tuple[str, ...], float] = OrderedDict()
        """When each was recorded, the oldest first."""

    def check(self, request: Request) -> None:
        """Raises RateLimitExceeded for an address that failed too often. Such an attempt is not recorded, so that no
        address can fill the audit log."""
        self._failures.check(request.client)

    def succeeded(self, request: Request, key: KeySection) -> None:
        """Record a sign-in with the rights of `key`, unless one was recorded a moment ago, so that no key can fill the
        audit log."""
        detail = "signed in as operator" if key.operator else "signed in"
        if self._is_new(request, key.id, key.name, detail):
            self._audit.record(
                _action(request), 200, key_id=key.id, key_name=key.name, client=request.client, detail=detail
            )

    def failed(self, request: Request, error: CortexError, *, is_counted: bool = True) -> None:
        """Record a sign-in that was rejected, or that failed at the provider. With `is_counted` it counts against the
        address; otherwise it is unlimited and recorded only once in a while."""
        if is_counted:
            self._failures.failed(request.client)
        elif not self._is_new(request, error.message):
            return
        log.warning("sign-in failed: %s", error.message)
        self._audit.record(_action(request), error.status, client=request.client, detail=error.message)

    def _is_new(self, request: Request, *facts: str) -> bool:
        """Whether this was not recorded within `ONCE_IN_S`. Marks it as recorded."""
        record, now = (network_of(request.client), _action(request), *facts), self._clock()
        if now - self._recorded.get(record, -ONCE_IN_S) < ONCE_IN_S:
            return False
        self._recorded[record] = now
        self._recorded.move_to_end(record)
        if len(self._recorded) > MOST_RECORDED:
            self._recorded.popitem(last=False)
        return True


def _action(request: Request) -> str:
    return f"{request.method.decode('latin-1')} {routed_path(request).decode('latin-1')}"


FLOW_COOKIE = b"cortex_sign_in"
_CONVERSATIONS = "/session/conversations"
_CONVERSATION_BYTES = 1024 * 1024
REST_INTERVAL_S = 30.0


class SigningIn:
    """Used on the loop's thread."""

    def __init__(self, metering: Metering, conversations: Conversations, attempts: SignInAttempts) -> None:
        self._metering = metering
        self._attempts = attempts
        self._conversations = conversations
        self._section = SignInSection()
        self._client: OpenIDClient | None = None
        self._deferred = DeferredResponses()

    async def use(self, section: SignInSection) -> None:
        """Use a new configuration, whose library is installed."""
        replaced = self._client
        if section != self._section:
            self._client = OpenIDClient(section) if section.issuer is not None else None
        self._section = section
        if replaced is not None and replaced is not self._client:
            await replaced.close()

    @property
    def has_conversations(self) -> bool:
        return self._section.conversations

    async def rest_idle(self) -> None:
        """Ends idle processes."""
        if self._client is not None:
            await self._client.rest_idle()

    async def close(self) -> None:
        await self._deferred.close()
        if self._client is not None:
            await self._client.close()

    def routes(self) -> list[HttpRoute]:
        one = f"{_CONVERSATIONS}/{{name}}"
        kept = self._conversations
        return [
            Route("GET", SIGN_IN_METHODS, self._show_methods),
            Route("GET", SIGN_IN_START, partial(self._with_provider, self._start)),
            Route("GET", SIGN_IN_CALLBACK, partial(self._with_provider, self._complete)),
            Route("GET", _CONVERSATIONS, partial(self._with_conversations, kept.show)),
            Route("PUT", one, partial(self._with_conversations, kept.put), lambda *_: _CONVERSATION_BYTES),
            Route("DELETE", one, partial(self._with_conversations, kept.delete)),
        ]

    def _with_conversations(
        self, work: Callable[..., Coroutine[Any, Any, Response]], exchange: Exchange, /, **values: str
    ) -> None:
        key = self._metering.meter.key(exchange.request)
        if key is None or not self._section.conversations:
            raise RouteNotFound("This gateway keeps no conversations; they stay in the browser.")
        self._deferred.respond(exchange, work(exchange.request, key, **values))

    def _show_methods(self, exchange: Exchange) -> None:
        exchange.respond(*json_response({"openid": self._client is not None, "key": not self._metering.is_open}))

    def _with_provider(
        self, work: Callable[[Request, OpenIDClient, Sessions], Coroutine[Any, Any, Response]], exchange: Exchange
    ) -> None:
        sessions = self._metering.sessions
        if self._client is None or sessions is None or self._section.public_url is None:
            raise RouteNotFound("This gateway has no sign-in provider; sign in with a key.")
        self._deferred.respond(exchange, work(exchange.request, self._client, sessions))

    async def _start(self, _: Request, client: OpenIDClient, sessions: Sessions) -> Response:
        location, flow = await client.begin()
        return _redirect(location, self._cookie(FLOW_COOKIE, sessions.sealed(flow), FLOW_S, "Lax"))

    async def _complete(self, request: Request, client: OpenIDClient, sessions: Sessions) -> Response:
        self._attempts.check(request)
        sealed = _flow_of(request)
        try:
            user = await client.complete(request.query, sessions.unsealed(sealed, Flow))
            key = self._section.key_of(user)
        except CortexError as error:
            # Without the cookie nothing was tried: any other page can make a browser send that.
            self._attempts.failed(request, error, is_counted=bool(sealed) and isinstance(error, InvalidAPIKey))
            raise
        self._attempts.succeeded(request, key)
        kept = replace(user, roles=self._section.relevant(user.roles))
        log.info("signed in: %s, operator: %s", key.name, key.operator)
        return _redirect(
            f"{(self._section.public_url or '').rstrip('/')}/",
            self._cookie(FLOW_COOKIE, "", 0, "Lax"),
            self._cookie(COOKIE, sessions.issue_user(kept), LIFETIME_S, "Strict"),
        )

    def _cookie(self, name: bytes, value: str, lifetime_s: int, same_site: str) -> tuple[bytes, bytes]:
        """The flow's cookie is not strict, because it must be sent after the provider's redirect. Its path is the
        folder of the page, as for the cookie of `Page`."""
        path = "/" + (self._section.public_url or "").partition("://")[2].partition("/")[2].strip("/")
        secure = "; Secure" if (self._section.public_url or "").startswith("https:") else ""
        text = f"{name.decode()}={value}; Path={path}; HttpOnly; SameSite={same_site}; Max-Age={lifetime_s}{secure}"
        return b"set-cookie", text.encode()


def _flow_of(request: Request) -> str:
    for part in (request.header(b"cookie") or b"").split(b";"):
        name, _, value = part.strip().partition(b"=")
        if name == FLOW_COOKIE:
            return value.decode("latin-1")
    return ""


def _redirect(location: str, *cookies: tuple[bytes, bytes]) -> Response:
    headers = ((b"location", location.encode("latin-1", "replace")), (b"cache-control", b"no-store"), *cookies)
    return Response(302, headers, b"")
