"""HTTP GET with redirects and proxies, which another thread can abort at once."""

from __future__ import annotations

import base64
import http.client
import re
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from socket import SHUT_RDWR, socket
from typing import Final

from cortex.neuron.weights.errors import Cancelled, HubError

CONNECT_TIMEOUT_S: Final = 10.0
IDLE_TIMEOUT_S: Final = 20.0
_MAX_REDIRECTS: Final = 6
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_USER_AGENT: Final = "cortex"
_SECONDS: Final = re.compile(r"\s*(\d{1,9})\s*")
_RESET: Final = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})")


_FAILURES: Final = (OSError, http.client.HTTPException)


class Interrupted(Exception):
    """The request failed; a retry may help, after `retry_after_s` where the hub named a time."""

    def __init__(self, reason: str, remedy: str = "check the network or HF_ENDPOINT", retry_after_s: float = 0) -> None:
        super().__init__(reason)
        self.remedy = remedy
        self.retry_after_s = retry_after_s


class HubResponse:
    """A response whose body is read in pieces."""

    def __init__(self, response: http.client.HTTPResponse, transport: Transport) -> None:
        self._response = response
        self._transport = transport
        self.status = response.status

    def header(self, name: str) -> str:
        """The header's value, empty where it is absent."""
        return self._response.getheader(name) or ""

    @property
    def retry_after_s(self) -> float:
        """The time until the hub accepts requests again, as `retry-after` or `ratelimit: "api";r=0;t=55` name it."""
        match = _SECONDS.fullmatch(self.header("retry-after")) or _RESET.search(self.header("ratelimit"))
        return float(match[1]) if match else 0.0

    def read(self, num_bytes: int) -> bytes:
        """At most `num_bytes` of the body; empty at its end. Raises Interrupted or Cancelled."""
        try:
            return self._response.read(num_bytes)
        except _FAILURES as error:
            raise self._transport.interrupted(error) from error


class Transport:
    """Requests to one hub. Thread-safe. After `abort()` every running and later request raises Cancelled.

    The token is sent only to the endpoint's own host, never to the target of a redirect.
    """

    def __init__(self, endpoint: str, token: str | None) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._token = token
        self._origin = _origin(self.endpoint)
        self._tls = ssl.create_default_context()
        self._aborted = threading.Event()
        self._sockets: set[socket] = set()
        self._sockets_lock = threading.Lock()

    def abort(self) -> None:
        """Abort all requests; idempotent."""
        self._aborted.set()
        with self._sockets_lock:
            for open_socket in self._sockets:
                try:
                    # Not the TLS shutdown: it would invalidate the session while another thread reads from it.
                    socket.shutdown(open_socket, SHUT_RDWR)
                except OSError:
                    pass  # the peer closed it already

    def pause(self, seconds: float) -> None:
        """Sleep. Raises Cancelled at once on an abort."""
        self._aborted.wait(seconds)
        self.check()

    def check(self) -> None:
        """Raise Cancelled after an abort."""
        if self._aborted.is_set():
            raise Cancelled("the download was cancelled")

    def interrupted(self, error: Exception) -> Interrupted:
        """`error` as an Interrupted. Raises Cancelled where an abort caused it."""
        self.check()
        return Interrupted(str(error) or type(error).__name__)

    @contextmanager
    def get(self, url: str, headers: Mapping[str, str]) -> Iterator[HubResponse]:
        """The response after all redirects, with any status. Raises Interrupted, Cancelled or HubError."""
        for _ in range(_MAX_REDIRECTS):
            with self._exchange(url, headers) as response:
                location = response.header("location")
                if response.status not in _REDIRECTS or not location:
                    yield response
                    return
                url = urllib.parse.urljoin(url, location)
        raise HubError(f"{self.endpoint} redirects in a loop; check HF_ENDPOINT")

    @contextmanager
    def _exchange(self, url: str, headers: Mapping[str, str]) -> Iterator[HubResponse]:
        self.check()
        connection, target, proxy_headers = self._connection(url)
        all_headers = {"user-agent": _USER_AGENT, "accept-encoding": "identity", **proxy_headers, **headers}
        if self._token and _origin(url) == self._origin:
            all_headers["authorization"] = f"Bearer {self._token}"
        with ExitStack() as stack:
            stack.callback(connection.close)
            try:
                connection.connect()
                stack.enter_context(self._watched(connection.sock))
                connection.request("GET", target, headers=all_headers)
                response = stack.enter_context(connection.getresponse())
            except _FAILURES as error:
                raise self.interrupted(error) from error
            yield HubResponse(response, self)

    @contextmanager
    def _watched(self, open_socket: socket) -> Iterator[None]:
        """Within the block, `abort` shuts the socket down."""
        open_socket.settimeout(IDLE_TIMEOUT_S)
        with self._sockets_lock:
            self._sockets.add(open_socket)
        try:
            self.check()
            yield
        finally:
            with self._sockets_lock:
                self._sockets.discard(open_socket)

    def _connection(self, url: str) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
        """A connection for `url`, through a proxy if the environment names one; the request target; headers for the
        proxy."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise HubError(f"{self.endpoint} redirects to {url[:200]!r}, which is not an HTTP URL; check HF_ENDPOINT")
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        proxy = urllib.request.getproxies().get(parts.scheme)
        if not proxy or urllib.request.proxy_bypass(parts.hostname):
            return self._direct(parts.scheme, parts.hostname, parts.port), target, {}
        via = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        if not via.hostname:
            raise HubError(f"the proxy {proxy!r} has no host name; check {parts.scheme}_proxy in the environment")
        port, proxy_headers = via.port or 80, _proxy_headers(via)
        if parts.scheme == "http":
            return self._direct("http", via.hostname, port), url, proxy_headers
        tunnel = self._direct("https", via.hostname, port)
        tunnel.set_tunnel(parts.hostname, parts.port or 443, proxy_headers)
        return tunnel, target, {}

    def _direct(self, scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
        if scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_S, context=self._tls)
        return http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)


def _proxy_headers(proxy: urllib.parse.SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    account = f"{urllib.parse.unquote(proxy.username)}:{urllib.parse.unquote(proxy.password or '')}"
    return {"proxy-authorization": f"Basic {base64.b64encode(account.encode()).decode()}"}


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname, parts.port
