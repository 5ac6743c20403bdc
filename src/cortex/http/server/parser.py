"""Parses a client's bytes into requests, and rejects what is malformed or over a limit."""

from __future__ import annotations

from collections.abc import Callable
from io import SEEK_END, BytesIO
from typing import NamedTuple

import httptools

from cortex.http.composed_body import BodySpool, cannot_spool, no_room
from cortex.http.limits import Buffered, ClientLimits, ClientShares
from cortex.http.request import Headers, Request
from cortex.wire.errors import BodyTooLarge, CortexError, HeadersTooLarge, MalformedHTTP

_CHECKED = frozenset((b"host", b"content-length", b"content-type", b"expect", b"transfer-encoding"))


def check_head(
    method: bytes, version: str, headers: Headers, limits: ClientLimits
) -> tuple[CortexError | None, bool, int]:
    """Why a request that the parser accepted is rejected, or None; whether the client waits for `100 Continue`; and the
    announced Content-Length, 0 without one."""
    num_hosts = num_types = content_length = 0
    transfer_encoding = expect = None
    for name, value in headers:
        if name not in _CHECKED:
            continue
        if name == b"host":
            num_hosts += 1
        elif name == b"content-type":
            num_types += 1
        elif name == b"content-length":
            content_length = int(value)
        elif name == b"expect":
            expect = value
        else:
            transfer_encoding = value
    is_plain = version == "1.1" and num_hosts == 1 and transfer_encoding is None and expect is None
    rejection = (
        None if is_plain and method != b"CONNECT" else _rejection(method, version, num_hosts, transfer_encoding, expect)
    )
    if rejection is None and num_types > 1:
        rejection = MalformedHTTP("a request may have one Content-Type header; send the one that is right")
    if rejection is None and len(headers) > limits.num_headers:
        rejection = HeadersTooLarge(f"{len(headers)} headers; at most {limits.num_headers} are accepted")
    return rejection, expect is not None and version == "1.1", content_length


def _rejection(
    method: bytes, version: str, num_hosts: int, transfer_encoding: bytes | None, expect: bytes | None
) -> CortexError | None:
    if version not in ("1.1", "1.0"):
        return MalformedHTTP(f"HTTP/{version} is not supported; use HTTP/1.1")
    if method == b"CONNECT":
        return MalformedHTTP("this server is not a proxy; send requests to its own paths instead of CONNECT")
    if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
        return MalformedHTTP("a request must have exactly one Host header")
    if transfer_encoding is not None and (version == "1.0" or transfer_encoding.lower() != b"chunked"):
        return MalformedHTTP("the only Transfer-Encoding accepted is chunked, in HTTP/1.1; or send Content-Length")
    if expect is not None and expect.lower() != b"100-continue":
        return MalformedHTTP("the only Expect accepted is 100-continue; omit the header")
    return None


def body_too_large(limits: ClientLimits) -> BodyTooLarge:
    """The error for a body over the limit."""
    return BodyTooLarge(
        f"the request body is over the limit of {limits.body_bytes / (1 << 20):g} MiB; send less, or raise max_body_mb"
    )


def split_target(target: bytes) -> tuple[bytes, bytes] | None:
    """Path and query of a request target in origin or absolute form (or `*`); None when it is neither."""
    if not target.startswith(b"/"):
        if target == b"*":
            return target, b""
        scheme, separator, rest = target.partition(b"://")
        if not separator or scheme.lower() not in (b"http", b"https"):
            return None
        slash = rest.find(b"/")
        target = rest[slash:] if slash >= 0 else b"/"
    path, _, query = target.partition(b"?")
    return path, query


_SPOOL_BYTES = 1 << 20
"""Shorter bodies stay in memory."""
_SLICE_BYTES = 4096
"""httptools cannot stop after a request, so bytes that may contain several of them are fed in slices of this size."""
_HEAD_END = b"\r\n\r\n"
_CHUNKING_OVERHEAD = 8
"""Wire bytes allowed per body byte: one-byte chunks need six, so more means endless chunk extensions."""

_COMMON_NAMES = {
    spelling: name
    for name in (
        b"accept",
        b"accept-encoding",
        b"accept-language",
        b"anthropic-beta",
        b"anthropic-version",
        b"authorization",
        b"connection",
        b"content-length",
        b"content-type",
        b"host",
        b"traceparent",
        b"user-agent",
        b"x-api-key",
        b"x-request-id",
    )
    for spelling in (name, name.title())
}
"""Names that are the same object in every request: each would take as much memory as its value."""


class Spooled(NamedTuple):
    """A body that may be longer than others: beyond a small size it is written to a file as it arrives."""

    max_bytes: int


AdmitHead = Callable[[Request], int | Spooled]
"""Admits a request whose body has not arrived yet: returns the most body bytes it may have, or raises CortexError.

Called on the loop's thread with the head and an empty body. Not called for a request that arrives complete within a few
kilobytes, which goes straight to the handler.
"""


class RequestParser:
    """The parser of one connection. Stops after a complete request, and for good at the first rejected one.

    Adds the bytes of bodies to `buffered` as they arrive; `release` subtracts them. The callbacks of httptools only
    record; decisions are made after `feed_data` has returned.
    """

    __slots__ = (
        "_admit_head",
        "_admitted",
        "_body",
        "_body_limit",
        "_buffered",
        "_client",
        "_content_length",
        "_declines_upgrade",
        "_headers",
        "_http_10",
        "_keeps_head",
        "_limits",
        "_num_held_bytes",
        "_num_message_bytes",
        "_parser",
        "_pieces",
        "_spool",
        "_spooled",
        "_spools",
        "_target",
        "in_head",
        "in_message",
        "method",
        "num_body_bytes",
        "owes_continue",
        "ready",
        "rejection",
    )

    def __init__(
        self,
        limits: ClientLimits,
        buffered: Buffered,
        admit_head: AdmitHead | None,
        client: str,
        spooled: ClientShares | None = None,
    ) -> None:
        """`spooled`: counts the bytes of bodies in files, as `buffered` does for those in memory."""
        self._limits = limits
        self._spooled = spooled or ClientShares(limits.spooled_bytes, limits.spooled_bytes_per_client)
        self._buffered = buffered
        self._admit_head = admit_head
        self._client = client
        self._parser = httptools.HttpRequestParser(self)
        self.ready: list[Request] = []
        """Complete requests for the connection to serve: one, or the few that came in one slice."""
        self.rejection: CortexError | None = None
        """Why nothing after `ready` will be served."""
        self.in_message = False
        """A request has begun and is not complete."""
        self.in_head = False
        self.owes_continue = False
        """The client waits for `100 Continue` before it sends the body; cleared by the connection that sends it."""
        self.method = b""
        """The method of the request parsed last."""
        self.num_body_bytes = 0
        """Bytes of the arriving body so far."""
        self._num_held_bytes = 0
        # The message being parsed:
        self._admitted = False
        self._declines_upgrade = False
        self._keeps_head = False
        self._num_message_bytes = 0
        self._body_limit = limits.body_bytes
        self._content_length = 0
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = b""
        """The first piece."""
        self._pieces: BytesIO | None = None
        """All pieces, if there is more than one. It grows as they arrive: joining tens of megabytes at the end would
        delay the loop, and an object for each tiny chunk takes twenty times the chunk's bytes."""
        self._spools = False
        self._spool: BodySpool | None = None
        """The file of a body that is too long for memory."""
        self._http_10 = False

    # --- for the connection

    @property
    def path(self) -> bytes:
        """The path of the request parsed last; empty when its target has none."""
        parts = split_target(self._target)
        return parts[0] if parts is not None else b""

    @property
    def headers(self) -> Headers:
        """The headers of the request parsed last."""
        return self._headers

    def feed(self, data: bytes) -> bytes:
        """Parse up to the end of a request or the reason to reject it; returns the bytes that were not parsed."""
        num_bytes = len(data)
        if num_bytes <= _SLICE_BYTES or num_bytes <= self._num_due_bytes():
            self._feed(data)
            return b""
        view = memoryview(data)
        position = 0
        while position < num_bytes and not self.ready and self.rejection is None:
            end = position + max(_SLICE_BYTES, self._num_due_bytes())
            if not self.in_message and (head_end := data.find(_HEAD_END, position, end)) >= 0:
                end = head_end + len(_HEAD_END)  # so the following body is one piece
            self._feed(view[position:end])
            position = end
        return data[position:] if self.rejection is None else b""

    def release(self, num_bytes: int) -> None:
        """The body of a request taken from `ready` is no longer needed."""
        self._num_held_bytes -= num_bytes
        self._buffered.num_bytes -= num_bytes

    def release_upload(self, num_bytes: int) -> None:
        """So is the file of one."""
        self._spooled.add(self._client, -num_bytes)

    def close(self) -> None:
        """Drop all bytes held; nothing can be parsed afterwards."""
        self._drop_body()
        self.release(self._num_held_bytes)
        for request in self.ready:
            self.release_upload(len(request.upload or b""))
        self.ready.clear()
        self._headers = []  # a request that was taken keeps its own
        self.in_message = False
        del self._parser  # a reference cycle

    # --- the callbacks of httptools

    def on_message_begin(self) -> None:
        self.in_message = True
        if not self._keeps_head:
            self.in_head = True
            self._target = b""
            self._headers = []
        self._clear_body()
        self.num_body_bytes = 0
        self._admitted = self._spools = False

    def on_url(self, url: bytes) -> None:
        if not self._keeps_head:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:
            self._headers.append((_COMMON_NAMES.get(name) or name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        if self._keeps_head:
            self._keeps_head = False
            return
        self.in_head = False
        if self.rejection is not None:
            return
        parser = self._parser
        version = parser.get_http_version()
        self.method = parser.get_method()
        self._http_10 = version == "1.0"
        self.rejection, self.owes_continue, self._content_length = check_head(
            self.method, version, self._headers, self._limits
        )
        self._body_limit = self._limits.body_bytes
        if self._num_message_bytes > self._limits.head_bytes:
            num_head_bytes = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if num_head_bytes > self._limits.head_bytes:
                self.rejection = self._head_too_large()
        self._declines_upgrade = parser.should_upgrade()

    def on_body(self, data: bytes) -> None:
        if self.rejection is not None:
            return
        num_bytes = len(data)
        self.num_body_bytes += num_bytes
        if self._spool is not None:
            self.rejection = self._spool.write(data)
            if self.num_body_bytes > self._body_limit:
                self.rejection = self._body_too_large()
            return
        self._num_held_bytes += num_bytes
        buffered = self._buffered
        buffered.num_bytes += num_bytes
        if not self._body:
            self._body = data
        else:
            if self._pieces is None:
                self._pieces = BytesIO(self._body)
                self._pieces.seek(0, SEEK_END)
            self._pieces.write(data)
        if self.num_body_bytes > self._body_limit:
            self.rejection = self._body_too_large()
        elif not buffered.has_room():
            self.rejection = no_room()
        elif self._spools and self.num_body_bytes > _SPOOL_BYTES:
            self._begin_spool()

    def _begin_spool(self) -> None:
        """Move what has arrived of the body from memory to a file."""
        arrived = self._body if self._pieces is None else self._pieces.getvalue()
        num_bytes = self.num_body_bytes
        self._drop_body()
        try:
            self._spool = BodySpool(self._spooled, self._client)
        except OSError as error:
            self.rejection = cannot_spool(error)
            return
        self.num_body_bytes = num_bytes
        self.rejection = self._spool.write(arrived)

    def on_message_complete(self) -> None:
        if self._declines_upgrade or self.rejection is not None:
            return
        parts = split_target(self._target)
        if parts is None:
            self.rejection = _bad_target()
            return
        body = self._body if self._pieces is None else self._pieces.getvalue()  # does not copy
        path, query = parts
        keeps_alive = self._parser.should_keep_alive()
        upload = None
        if self._spool is not None:
            upload = self._spool.taken()
            self._spool = None
        self.ready.append(
            Request(self.method, path, query, self._headers, body, self._client, keeps_alive, self._http_10, upload)
        )
        self._clear_body()
        self.num_body_bytes = 0
        self._num_message_bytes = 0
        self.in_message = False
        self.owes_continue = False

    # --- between the callbacks

    def _feed(self, data: bytes | memoryview) -> None:
        if not self.in_message:
            self._num_message_bytes = 0
        self._num_message_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self.rejection is None:
                self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self.rejection is None:
                self.rejection = MalformedHTTP(f"the request is malformed: {error}")
        if self.in_message and self.rejection is None:
            self._check_progress()
        if self.rejection is not None:
            self._drop_body()

    def _decline_upgrade(self, rest: bytes | memoryview) -> None:
        """Go on as if there were no `Upgrade` header: some clients offer HTTP/2 with every request, with a body.

        httptools stops at such a head, so a second parser, given only the framing, reads the body.
        """
        self._declines_upgrade = False
        self._keeps_head = True
        self._parser = httptools.HttpRequestParser(self)
        framing = [pair for pair in self._headers if pair[0] in (b"content-length", b"transfer-encoding")]
        self._feed(_body_head(framing) + rest)

    def _check_progress(self) -> None:
        """Reject an incomplete request that exceeds a limit or is not admitted."""
        limits = self._limits
        if self.in_head:
            if self._num_message_bytes > limits.head_bytes or len(self._headers) > limits.num_headers:
                self.rejection = self._head_too_large()
            return
        if not self._admitted:
            self._admitted = True
            self.rejection = self._check_admission()
        elif self._num_message_bytes > 2 * limits.head_bytes + _CHUNKING_OVERHEAD * self.num_body_bytes:
            self.rejection = MalformedHTTP("the chunked body is mostly chunk extensions; send plain chunks")

    def _check_admission(self) -> CortexError | None:
        """Why the request is rejected before the rest of its body arrives, or None."""
        parts = split_target(self._target)
        if parts is None:
            return _bad_target()
        if self._admit_head is not None:
            try:
                limit = self._admit_head(Request(self.method, *parts, self._headers, b"", self._client))
            except CortexError as error:
                return error
            self._spools = isinstance(limit, Spooled)
            if isinstance(limit, Spooled):
                self._body_limit = limit.max_bytes
            else:
                self._body_limit = min(limit, self._body_limit)
        if max(self._content_length, self.num_body_bytes) > self._body_limit:
            return self._body_too_large()
        if self._spools and self._num_due_bytes() > _SPOOL_BYTES:
            return None if self._spooled.has_room(self._client, self._num_due_bytes()) else no_room("on disk")
        return None if self._buffered.has_room(self._num_due_bytes()) else no_room()

    def _num_due_bytes(self) -> int:
        """Bytes that the Content-Length of the arriving body still announces; 0 in a head and for chunks."""
        return max(0, self._content_length - self.num_body_bytes) if self.in_message and not self.in_head else 0

    def _clear_body(self) -> None:
        self._body = b""
        self._pieces = None

    def _drop_body(self) -> None:
        """Drop the body of the rejected request; requests in `ready` are still served."""
        if self._spool is not None:
            self._spool.drop()
            self._spool = None
        else:
            self.release(self.num_body_bytes)
        self._clear_body()
        self.num_body_bytes = 0

    def _head_too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(
            f"the head of the request is over the limit of {self._limits.head_bytes} bytes or"
            f" {self._limits.num_headers} headers; send less"
        )

    def _body_too_large(self) -> BodyTooLarge:
        if self._body_limit == self._limits.body_bytes:
            return body_too_large(self._limits)
        return BodyTooLarge(f"the request body is over the {self._body_limit} bytes that this path accepts; send less")


def _bad_target() -> MalformedHTTP:
    return MalformedHTTP("the request target must be a path or an absolute http URL")


def _body_head(framing: Headers) -> bytes:
    """The head of a request that only frames its body."""
    return b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in framing) + b"\r\n"
