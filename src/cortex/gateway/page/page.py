"""The routes of the page: its files, which are read and compressed once, when it is first opened, and `/session`, with
which a browser signs in, reads its identity, and signs out.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import msgspec

from cortex import __version__
from cortex.gateway.ledger.keys import KeySection
from cortex.gateway.ledger.meter import Metering
from cortex.gateway.ledger.sessions import COOKIE, LIFETIME_S, PAGE_HEADER, is_cross_site
from cortex.gateway.page.signing_in import SignInAttempts, SigningIn
from cortex.gateway.proxy.listener import PAGE_FILES, SESSION_PATH
from cortex.gateway.proxy.routes import HttpHandler, HttpRoute, error_response, json_response
from cortex.http.request import Request
from cortex.http.routing import Route
from cortex.http.server.exchange import Exchange
from cortex.http.server.server import Response
from cortex.wire.error_encoding import OPENAI
from cortex.wire.errors import (
    InvalidAPIKey,
    InvalidValue,
    RouteNotFound,
    shorten,
)

INDEX = "index.html"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",  # pictures of the user's own
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
"""Only this origin's files run or load, and only this origin is connected to; text becomes HTML only through the
sanitiser."""
_SECURITY_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)

_NOT_STORED = (b"cache-control", b"no-store")


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file in both encodings."""

    content_type: bytes
    plain: bytes
    compressed: bytes
    etag: bytes


def read_bundle() -> Mapping[str, PageFile]:
    """Every file of the page by its path. Takes a moment: call it on another thread."""
    return dict(_walk(resources.files(__package__) / "files", ""))


def respond(file: PageFile, request: Request) -> Response:
    """The response with `file`, or 304 when the browser has it."""
    headers = [
        (b"etag", file.etag),
        (b"cache-control", b"no-cache"),
        (b"vary", b"accept, accept-encoding"),
        *_SECURITY_HEADERS,
    ]
    if file.etag in (tag.strip().removeprefix(b"W/") for tag in (request.header(b"if-none-match") or b"").split(b",")):
        return Response(304, headers, b"")
    headers.append((b"content-type", file.content_type))
    if b"gzip" not in (request.header(b"accept-encoding") or b""):
        return Response(200, headers, file.plain)
    headers.append((b"content-encoding", b"gzip"))
    return Response(200, headers, file.compressed)


def wants_html(request: Request) -> bool:
    """Whether a browser sent the request, and not a program."""
    return b"text/html" in (request.header(b"accept") or b"")


def _walk(folder: Traversable, path: str) -> list[tuple[str, PageFile]]:
    found: list[tuple[str, PageFile]] = []
    for entry in folder.iterdir():
        name = path + entry.name
        if entry.is_dir():
            found += _walk(entry, f"{name}/")
        elif (content_type := _TYPES.get(name[name.rfind(".") :])) is not None:
            data = entry.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'.encode()
            found.append((name, PageFile(content_type.encode(), data, gzip.compress(data, 9, mtime=0), etag)))
    return found


class _SignIn(msgspec.Struct, frozen=True):
    """The body of `POST /session`."""

    key: str


class Page:
    """Serves the page. Used on the loop's thread; files are read on another one, at the first request."""

    def __init__(
        self, metering: Metering, signing_in: SigningIn, attempts: SignInAttempts, *, is_secure: bool = False
    ) -> None:
        """`is_secure`: browsers reach the page over HTTPS only, so that its cookie is never sent without."""
        self._is_secure = is_secure
        self._signing_in = signing_in
        self._metering = metering
        self._attempts = attempts
        self._bundle: Mapping[str, PageFile] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: list[Callable[[], None]] = []

    def routes(self, index: HttpHandler) -> list[HttpRoute]:
        """`index`: what programs get where browsers get the page."""
        return [
            Route("GET", "/", partial(self._show_index, index)),
            Route("GET", f"{PAGE_FILES}{{name:.+}}", self._show),
            Route("GET", SESSION_PATH, self._describe),
            Route("POST", SESSION_PATH, partial(self._change, self._sign_in)),
            Route("DELETE", SESSION_PATH, partial(self._change, self._sign_out)),
            *self._signing_in.routes(),
        ]

    def _show_index(self, index: HttpHandler, exchange: Exchange) -> None:
        if wants_html(exchange.request):
            self._show(exchange, INDEX)
        else:
            index(exchange)

    def _show(self, exchange: Exchange, name: str) -> None:
        if self._bundle is not None:
            file = self._bundle.get(name)
            if file is None:
                missing = RouteNotFound(f"The page has no file {shorten(name)}; open / instead.")
                exchange.respond(*error_response(missing, OPENAI))
            else:
                exchange.respond(*respond(file, exchange.request))
        else:
            self._waiting.append(lambda: self._show(exchange, name))
            if self._reading is None:
                self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            self._bundle = await asyncio.to_thread(read_bundle)
        except OSError:
            self._bundle = {}
            raise
        finally:
            waiting, self._waiting = self._waiting, []
            for resume in waiting:
                resume()

    def _describe(self, exchange: Exchange) -> None:
        key = self._metering.meter.key(exchange.request)
        exchange.respond(*_described(key, has_conversations=self._signing_in.has_conversations))

    def _change(self, work: Callable[[Request], Response], exchange: Exchange) -> None:
        if exchange.request.header(PAGE_HEADER) is None or is_cross_site(exchange.request):
            raise InvalidValue("/session is changed by the page only; programs send their key with every request.")
        exchange.respond(*work(exchange.request))

    def _sign_out(self, request: Request) -> Response:
        return json_response({"signed_in": False})._replace(headers=(self._cookie("", 0, request), _NOT_STORED))

    def _sign_in(self, request: Request) -> Response:
        try:
            text = msgspec.json.decode(request.body, type=_SignIn).key.strip()
        except (msgspec.DecodeError, UnicodeDecodeError) as problem:
            raise InvalidValue(f'The body must be {{"key": "…"}}: {shorten(str(problem))}') from problem
        self._attempts.check(request)
        try:
            signed_in = self._metering.meter.sign_in(text)
        except InvalidAPIKey as error:
            self._attempts.failed(request, error)
            raise
        if signed_in is None:
            raise InvalidAPIKey("This gateway is open: there is nothing to sign in to.")
        key, session = signed_in
        self._attempts.succeeded(request, key)
        response = json_response({"signed_in": True})
        return response._replace(headers=(*response.headers, self._cookie(session, LIFETIME_S, request), _NOT_STORED))

    def _cookie(self, value: str, lifetime_s: int, request: Request) -> tuple[bytes, bytes]:
        """Without a path, so that it covers the prefix under which a proxy may serve the page, and nothing else."""
        secure = "; Secure" if self._is_secure or request.header(b"x-forwarded-proto") == b"https" else ""
        text = f"{COOKIE.decode()}={value}; HttpOnly; SameSite=Strict; Max-Age={lifetime_s}{secure}"
        return b"set-cookie", text.encode()


def _described(key: KeySection | None, *, has_conversations: bool) -> Response:
    """Who is signed in, and what they may do."""
    body: dict[str, Any] = {
        "version": __version__,
        "open": key is None,
        "name": None if key is None else key.name,
        "operator": key is None or key.operator,
        "conversations": key is not None and has_conversations,
    }
    response = json_response(body)
    return response._replace(headers=(*response.headers, _NOT_STORED))
