"""Checks the head of a request for what could be read in two ways.

The parser already rejects most of what request smuggling relies on: both lengths, repeated or signed lengths, folded
lines, bare line feeds, spaces before colons, broken chunks. This module rejects what the parser lets through.
"""

from __future__ import annotations

from cortex.http.limits import ClientLimits
from cortex.http.request import Headers
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
