"""A fake hub on localhost with the API of the real one and injected faults."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

COMMIT = "c0ffee" + "0" * 34


@dataclass
class FakeHub:
    """Serves `files` of one repository, and `others`. Each request for contents consumes one entry of `faults`."""

    files: dict[str, bytes]
    repository: str = "org/model"
    commit: str = COMMIT
    token: str | None = None
    faults: list[Callable[[Any, bytes], bytes | None]] = field(default_factory=list)
    listing_status: int = 200
    listing_headers: dict[str, str] = field(default_factory=dict)
    listing_override: Any = None
    head_status: int = 200
    head_headers: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    ignores_ranges: bool = False
    redirect_to: str | None = None
    renamed_from: str | None = None
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    others: list[FakeHub] = field(default_factory=list)
    endpoint: str = ""
    stalled: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    def contents_requests(self) -> list[tuple[str, dict[str, str]]]:
        return [(path, headers) for path, headers in self.requests if "/resolve/" in path]

    def listing(self) -> Any:
        if self.listing_override is not None:
            return self.listing_override
        siblings = [self.sibling(path, data) for path, data in self.files.items()]
        return {"id": self.repository, "sha": self.commit, "siblings": siblings}

    def sibling(self, path: str, data: bytes) -> dict[str, Any]:
        size = self.sizes.get(path, len(data))
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry: dict[str, Any] = {"rfilename": path, "size": size, "blobId": git}
        if path.endswith((".safetensors", ".gguf")):
            digest = self.digests.get(path, hashlib.sha256(data).hexdigest())
            entry["lfs"] = {"sha256": digest, "size": size, "pointerSize": 134}
        elif path in self.digests:
            entry["blobId"] = self.digests[path]
        return entry

    def identity(self, path: str) -> dict[str, str]:
        """The headers with which the hub identifies a file before it redirects to its contents."""
        if path not in self.files:
            return {}
        entry = self.sibling(path, self.files[path])
        digest = entry["lfs"]["sha256"] if "lfs" in entry else entry["blobId"]
        return {"x-repo-commit": self.commit, "x-linked-etag": f'"{digest}"', "x-linked-size": str(entry["size"])}


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        """Consumes no fault, and is not listed among the requests."""
        name = self.path.rpartition("/resolve/")[2].partition("/")[2]
        if self.hub.head_status != 200 or name not in self.hub.files:
            return self.respond(self.hub.head_status if name in self.hub.files else 404, b"")
        return self.respond(200, b"", self.hub.identity(name) | self.hub.head_headers)

    def do_GET(self) -> None:
        hub = next((other for other in self.hub.others if f"/{other.repository}/" in self.path), self.hub)
        self.path = self.path.removeprefix("http://hub.invalid")  # a proxy gets absolute URLs
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append((self.path, headers))
        if hub.token and headers.get("authorization") != f"Bearer {hub.token}" and not self.path.startswith("/cdn/"):
            return self.respond(401, b"{}")
        if self.path.startswith(f"/api/models/{hub.repository}/revision/"):
            return self.respond(hub.listing_status, json.dumps(hub.listing()).encode(), hub.listing_headers)
        if hub.renamed_from and f"/{hub.renamed_from}/" in self.path:
            return self.respond(307, b"", {"location": self.path.replace(hub.renamed_from, hub.repository)})
        prefix = f"/{hub.repository}/resolve/"
        name = self.path.removeprefix("/cdn/")
        if self.path.startswith(prefix):
            revision, _, name = self.path.removeprefix(prefix).partition("/")
            if revision not in (hub.commit, "main"):
                return self.respond(404, b"{}", {"x-error-code": "RevisionNotFound"})
            if hub.redirect_to is not None:
                return self.respond(302, b"", {"location": f"{hub.redirect_to}/cdn/{name}", **hub.identity(name)})
        if name not in hub.files:
            return self.respond(404, b"{}", {"x-error-code": "RepoNotFound"})
        return self.contents(hub.files[name], headers.get("range"))

    def contents(self, data: bytes, wanted: str | None) -> None:
        start, status, extra = 0, 200, {}
        if wanted and not self.hub.ignores_ranges:
            first, last = wanted.removeprefix("bytes=").split("-")
            start, end = int(first), min(int(last or len(data)) + 1, len(data))
            if start >= len(data):
                return self.respond(416, b"")
            status, extra = 206, {"content-range": f"bytes {start}-{end - 1}/{len(data)}"}
            data = data[start:end]
        fault = self.hub.faults.pop(0) if self.hub.faults else None
        if fault is None:
            return self.respond(status, data, extra)
        altered = fault(self, data)
        if altered is not None:
            self.respond(status, altered, extra | {"content-length": str(len(data))})
            self.close_connection = True
        return None

    def respond(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"content-length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(b"" if self.command == "HEAD" else body)
        except (BrokenPipeError, ConnectionResetError):
            pass


@contextmanager
def served(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub at its endpoint, until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.release.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def start_hub() -> Iterator[Callable[..., FakeHub]]:
    with ExitStack() as stack:
        yield lambda files, **options: stack.enter_context(served(FakeHub(files, **options)))
