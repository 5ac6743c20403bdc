"""The files of the page, read and compressed once, when it is first opened."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from cortex.http.request import Request
from cortex.http.server.server import Response

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
