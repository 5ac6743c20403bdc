"""The commands' HTTP client for a running gateway: blocking, on the standard library. Raises `CommandError`."""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import os
import re
import secrets
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

import click
import msgspec

from cortex.http.tls import client_context
from cortex.settings import is_one_key

from .failures import CommandError, ExitCode

DEFAULT_URL = "http://127.0.0.1:31313"
_CHUNK_BYTES = 1 << 18

_EXIT_CODES: dict[int | str, ExitCode] = {
    401: ExitCode.DENIED,
    403: ExitCode.DENIED,
    404: ExitCode.NOT_FOUND,
    507: ExitCode.NO_ROOM,
    "invalid_value": ExitCode.USAGE,
    "hub_unavailable": ExitCode.UNREACHABLE,
    "route_not_found": ExitCode.UNREACHABLE,
    "upstream_unavailable": ExitCode.UNREACHABLE,
    "draining": ExitCode.UNREACHABLE,
    "source_not_found": ExitCode.NOT_FOUND,
}
"""By the error code of the gateway, or by the HTTP status."""

_REMEDIES: dict[int | str, str] = {
    401: "set CORTEX_API_KEY to a key made with `cortex keys add`",
    503: "try again in a moment",
    "model_not_found": "list the models with `cortex models`",
    "draining": "see `cortex status`",
    "model_in_use": "see `cortex ps`",
    "hub_unavailable": "try again once the node reaches it",
    "route_not_found": "check --url: it must be the API of a gateway",
    "source_not_found": "check the name, the revision and the quantisation",
    "managed_by_file": "name the file with --config",
    "disk_full": "delete models with `cortex rm`, or choose another node with --node",
    "operator_only": "set CORTEX_API_KEY to a key made with `cortex keys add NAME --operator`",
}
"""By the error code of the gateway, or by the HTTP status."""

_STORED_S = 3600.0
"""A gateway responds to an upload of gigabytes only when its node has the file."""


def exit_code_for(status: int, code: str) -> ExitCode:
    """The exit code of a command that failed because of an error of a gateway or a node."""
    return _EXIT_CODES.get(code) or _EXIT_CODES.get(status, ExitCode.FAILED)


_ROUTE_ADVICE = re.compile(r"[:;] GET /\S+ lists [^;]*")
"""Advice in an error for programs, which commands replace by a command to run."""


class GatewayUnreachable(CommandError):
    """There is no response from the address. `reason` says why."""

    def __init__(self, url: str, reason: str, remedy: str | None = None) -> None:
        super().__init__(
            f"no gateway at {url} ({reason})",
            remedy or "start one with `cortex up`, or name another with --url or CORTEX_URL",
            ExitCode.UNREACHABLE,
        )
        self.reason = reason


class GatewayRejected(CommandError):
    """The gateway responded with an error; `code` is its error code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        message = _ROUTE_ADVICE.sub("", message.rstrip("."))
        remedy = _REMEDIES.get(code) or _REMEDIES.get(status)
        if remedy is None:
            message, _, remedy = message.partition("; ")
        super().__init__(message, remedy or "see `cortex status` and `cortex doctor`", exit_code_for(status, code))
        self.status = status
        self.code = code


class GatewayClient:
    """One gateway by its base URL. Opens a connection per call. Not thread-safe."""

    def __init__(
        self, url: str, api_key: str | None, timeout_s: float = 30.0, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """`tls` verifies the certificate of an https gateway; absent: against the authorities of the system."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, self._port = parts.hostname, parts.port
        except ValueError:  # of the port, or of brackets
            host = None
        if host is None or parts.scheme not in ("http", "https"):
            raise CommandError(f"{url} is not a gateway address", f"write it like {DEFAULT_URL}", ExitCode.USAGE)
        api_key = (api_key or "").strip()
        if not is_one_key(api_key):
            raise CommandError("the key contains an invalid character", "set CORTEX_API_KEY to one key", ExitCode.USAGE)
        self._host = host
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._base}"
        self._is_secure = parts.scheme == "https"
        self._tls = tls
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self.api_key = api_key

    def at(self, url: str, tls: ssl.SSLContext | None) -> GatewayClient:
        """Another gateway, with the same key; `tls` counts where this one has none."""
        return GatewayClient(url, self.api_key, self._timeout_s, tls=self._tls or tls)

    def get(self, path: str) -> Any:
        """The decoded JSON of `GET path`."""
        with self._exchange("GET", path, None) as response:
            return self._decode(response.read())

    def post(self, path: str, body: Any = None) -> Any:
        """The decoded JSON of `POST path`, or None for an empty response."""
        with self._exchange("POST", path, {} if body is None else body) as response:
            content = response.read()
        return self._decode(content) if content else None

    def patch(self, path: str, body: Any) -> Any:
        """The decoded JSON of `PATCH path`."""
        with self._exchange("PATCH", path, body) as response:
            return self._decode(response.read())

    def delete(self, path: str) -> Any:
        """The decoded JSON of `DELETE path`."""
        with self._exchange("DELETE", path, None) as response:
            return self._decode(response.read())

    @contextlib.contextmanager
    def stream(self, path: str, body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The JSON `data:` payloads of an event stream, as they arrive. Leaving the block closes the connection."""
        with self._exchange("POST", path, body) as response:
            yield self._events(response)

    def upload(self, path: str, fields: dict[str, str], file: Path) -> Any:
        """The decoded JSON of `POST path` with a form whose field `file` is the content of a file, which is not held in
        memory."""
        boundary = f"cortex-{secrets.token_hex(16)}"
        parts = [
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in fields.items()
        ]
        name = "".join(character for character in file.name if character.isprintable() and character not in '"\\')
        head = f'{"".join(parts)}--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
        tail = f"\r\n--{boundary}--\r\n".encode()
        try:
            with file.open("rb") as content:
                num_bytes = len(head.encode()) + os.fstat(content.fileno()).st_size + len(tail)
                headers = {
                    "content-type": f"multipart/form-data; boundary={boundary}",
                    "content-length": str(num_bytes),
                }
                chunks = iter(lambda: content.read(_CHUNK_BYTES), b"")
                body = itertools.chain([head.encode()], chunks, [tail])
                with self._exchange("POST", path, body, headers) as response:
                    return self._decode(response.read())
        except OSError as problem:
            reason = problem.strerror or str(problem)
            raise CommandError(f"cannot read {file} ({reason})", "name a file", ExitCode.USAGE) from problem

    def has(self, path: str) -> bool:
        """Whether the resource at `GET path` exists."""
        try:
            with self._exchange("GET", path, None):
                return True
        except GatewayRejected as rejected:
            if rejected.status != http.HTTPStatus.NOT_FOUND:
                raise
            return False

    def send(self, path: str, file: Path) -> None:
        """`POST path` with the content of a file, which is not held in memory. Raises OSError."""
        with file.open("rb") as content:
            length = str(os.fstat(content.fileno()).st_size)
            headers = {"content-type": "application/octet-stream", "content-length": length}
            chunks = iter(lambda: content.read(_CHUNK_BYTES), b"")
            with self._exchange("POST", path, chunks, headers, timeout_s=_STORED_S):
                pass

    def download(self, path: str, out: IO[bytes]) -> None:
        """Write the response to `GET path` to `out`, piece by piece."""
        with self._exchange("GET", path, None) as response:
            while data := self._piece(response):
                out.write(data)

    def _piece(self, response: http.client.HTTPResponse) -> bytes:
        """The next bytes of a response; none at its end."""
        try:
            data = response.read(_CHUNK_BYTES)
        except (http.client.HTTPException, OSError) as error:
            raise CommandError(f"the response ended early ({error})", "try again", ExitCode.UNREACHABLE) from error
        if not data and response.length:
            why = f"the response ended early ({response.length} bytes are missing)"
            raise CommandError(why, "try again", ExitCode.UNREACHABLE)
        return data

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        try:
            for line in response:
                if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
                    event = self._decode(payload)
                    if "error" in event:
                        raise _rejection(response.status, event)
                    yield event
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"the response ended early ({error})", "try again", ExitCode.UNREACHABLE) from error

    @contextlib.contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        body: Any,
        raw_headers: dict[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """`body` is sent as JSON; with `raw_headers`, it is an iterable of bytes that is sent with these."""
        with contextlib.closing(self._connection(timeout_s or self._timeout_s)) as connection:
            content = body if body is None or raw_headers else msgspec.json.encode(body)
            headers = {**self._headers, **(raw_headers or ({"content-type": "application/json"} if content else {}))}
            try:
                connection.request(method, self._base + path, body=content, headers=headers)
                response = connection.getresponse()
                rejection = response.read() if response.status >= 400 else None
            except TimeoutError as error:
                raise GatewayUnreachable(self.url, f"no response within {timeout_s or self._timeout_s:g} s") from error
            except ssl.SSLCertVerificationError as error:
                remedy = "name the authority of its certificate with --ca-file or CORTEX_CA_FILE"
                raise GatewayUnreachable(self.url, f"certificate: {error.verify_message}", remedy) from error
            except ssl.SSLError as error:
                is_plain = error.reason == "WRONG_VERSION_NUMBER"
                advice = "write http:// if it has no certificate" if is_plain else None
                raise GatewayUnreachable(self.url, f"TLS: {error.reason or error}", advice) from error
            except (OSError, http.client.HTTPException) as error:
                is_closed = isinstance(error, http.client.RemoteDisconnected) and not self._is_secure
                advice = "write https:// if it has a certificate" if is_closed else None
                raise GatewayUnreachable(self.url, getattr(error, "strerror", None) or str(error), advice) from error
            if rejection is not None:
                raise _rejection(response.status, self._decode(rejection))
            yield response

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._is_secure:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _decode(self, content: bytes) -> Any:
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise CommandError(
                f"the server at {self.url} is not a cortex gateway", "check --url", ExitCode.UNREACHABLE
            ) from error


def _rejection(status: int, body: Any) -> GatewayRejected:
    error = body.get("error", {}) if isinstance(body, dict) else {}
    if not isinstance(error, dict):
        error = {"message": str(error)}
    return GatewayRejected(
        status, str(error.get("code", "")), str(error.get("message", f"the gateway responded with status {status}"))
    )


def model_path(model_id: str, action: str) -> str:
    """The fleet route of `action` for a model; ids may contain slashes."""
    return f"/fleet/models/{quote(model_id, safe='')}/{action}"


def gateway_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--url`, `--api-key` and `--ca-file`, passed on as one `gateway` argument."""

    @click.option(
        "-e",
        "--url",
        "--endpoint",
        "url",
        envvar="CORTEX_URL",
        default=DEFAULT_URL,
        show_default=True,
        help="Gateway, or CORTEX_URL.",
    )
    @click.option("--api-key", envvar="CORTEX_API_KEY", default=None, help="Key to send, or CORTEX_API_KEY.")
    @click.option(
        "--ca-file",
        envvar="CORTEX_CA_FILE",
        type=click.Path(path_type=Path),
        default=None,
        help="Certificates to trust for an https gateway, or CORTEX_CA_FILE.",
    )
    @functools.wraps(function)
    def command(url: str, api_key: str | None, ca_file: Path | None, **arguments: Any) -> Any:
        tls = client_context(ca_file) if ca_file is not None else None
        return function(gateway=GatewayClient(url, api_key, tls=tls), **arguments)

    return command
