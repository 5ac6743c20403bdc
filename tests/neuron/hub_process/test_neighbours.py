"""Files from other nodes: with and without the hub, resumed, and never altered ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.hub_process.resolver import FileSources, resolve
from cortex.neuron.weights.errors import HubError, HubUnreachable
from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.wire.node.neighbours import PATH, Neighbour, repository_of

from .hub_client import COMMIT, MODEL, WANTED, WEIGHTS, Client, StartHub

Alter = Callable[[str, bytes], bytes]


class FakeNeighbour:
    """Shares a cache as a node does. `alter` changes what it sends; a shorter body ends the connection early."""

    def __init__(self, cache: Path, alter: Alter = lambda _, data: data) -> None:
        self.cache = RepositoryCache(cache, "org/model")
        self.alter = alter
        self.listing: Any = None
        self.requests: list[str] = []
        handler = type("Handler", (_Handler,), {"neighbour": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def named(self) -> Neighbour:
        port = self.server.server_port
        return Neighbour(name=f"node-{port}", url=f"http://127.0.0.1:{port}", ticket="ticket")

    def body(self, target: str) -> bytes:
        if "?revision=" in target:
            found = self.cache.listing("main")
            assert found is not None
            files = [{"path": f.path, "num_bytes": f.num_bytes, "digest": f.digest} for f in found.files.values()]
            return json.dumps(self.listing or {"commit": found.commit, "files": files}).encode()
        digest, _, offset = target.partition("?offset=")
        data = (self.cache.root / "blobs" / digest).read_bytes()
        return data[int(offset) :]


class _Handler(BaseHTTPRequestHandler):
    neighbour: FakeNeighbour

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        target = self.path.removeprefix(f"{PATH}org/model").lstrip("/")
        self.neighbour.requests.append(target)
        assert self.headers["authorization"] == "Bearer ticket"
        body = self.neighbour.body(target)
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(self.neighbour.alter(target, body))


@pytest.fixture
def share(start_hub: StartHub, tmp_path: Path) -> Iterator[Callable[..., FakeNeighbour]]:
    """Starts a neighbour that has the model."""
    with ExitStack() as stack:

        def start(alter: Alter = lambda _, data: data) -> FakeNeighbour:
            cache = tmp_path / f"neighbour-{threading.active_count()}-{id(alter)}"
            Client(cache).resolve(start_hub(MODEL))
            neighbour = FakeNeighbour(cache, alter)
            stack.callback(neighbour.server.server_close)
            stack.callback(neighbour.server.shutdown)
            return neighbour

        yield start


def sources(*neighbours: FakeNeighbour, uses_hub: bool = True) -> FileSources:
    return FileSources(tuple(each.named for each in neighbours), uses_hub)


def test_files_of_a_neighbour_are_not_downloaded_from_the_hub(
    share: Callable[..., FakeNeighbour], start_hub: StartHub, client: Client
) -> None:
    hub = start_hub(MODEL)
    path = client.resolve(hub, sources=sources(share()))
    assert {found.name for found in path.iterdir()} == WANTED
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert not hub.contents_requests()
    total = sum(len(MODEL[name]) for name in WANTED)
    assert client.reports[-1] == (total, total)


@pytest.mark.parametrize("options", [{}, {"environment": {"HF_HUB_OFFLINE": "1"}}])
def test_node_without_the_hub_is_filled_by_a_neighbour(
    share: Callable[..., FakeNeighbour], client: Client, options: dict[str, Any]
) -> None:
    path = client.resolve(None, sources=sources(share()), **options)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert path == client.cache / "models--org--model" / "snapshots" / COMMIT
    assert client.resolve(None, offline=True) == path, "the revision is known"


def test_copy_takes_what_the_neighbour_has_and_asks_no_hub(
    share: Callable[..., FakeNeighbour], start_hub: StartHub, client: Client
) -> None:
    hub = start_hub(MODEL, commit="d" * 40)
    path = client.resolve(hub, sources=sources(share(), uses_hub=False))
    assert path.name == COMMIT
    assert not hub.requests


def test_transfer_that_breaks_is_continued_by_another_neighbour_and_by_the_hub(
    share: Callable[..., FakeNeighbour], start_hub: StartHub, client: Client
) -> None:
    def half(target: str, data: bytes) -> bytes:
        return data[: len(data) // 2] if len(data) > 1000 else data

    first, second, hub = share(half), share(half), start_hub(MODEL)
    path = client.resolve(hub, sources=sources(first, second))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    offsets = {int(target.partition("=")[2]) for target in first.requests + second.requests if "=" in target}
    assert len(WEIGHTS) // 2 in offsets, "the second goes on where the first stopped"
    (wanted,) = [headers for name, headers in hub.contents_requests() if name.endswith("model.safetensors")]
    half_bytes = len(WEIGHTS) // 2
    assert wanted["range"] == f"bytes={half_bytes + (len(WEIGHTS) - half_bytes) // 2}-", "and so does the hub"


def test_neighbour_that_fails_at_first_is_asked_again_if_there_is_no_hub(
    share: Callable[..., FakeNeighbour], client: Client
) -> None:
    failures = {"left": 3}

    def fails(target: str, data: bytes) -> bytes:
        if "?offset=" in target and failures["left"]:
            failures["left"] -= 1
            return data[:10]
        return data

    path = client.resolve(None, sources=sources(share(fails)))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_altered_file_is_not_used_and_comes_from_elsewhere(
    share: Callable[..., FakeNeighbour], start_hub: StartHub, client: Client
) -> None:
    def alter(target: str, data: bytes) -> bytes:
        return bytes(len(data)) if "?offset=" in target else data

    altered = share(alter)
    with pytest.raises(HubUnreachable, match="intact copy"):
        client.resolve(None, sources=sources(altered))
    assert not list(client.cache.rglob("model.safetensors"))
    path = client.resolve(None, sources=sources(altered, share()))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    other = Client(client.cache / "other")
    assert (other.resolve(start_hub(MODEL), sources=sources(altered)) / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    "listing",
    [
        {"commit": "../../../etc", "files": []},
        {"commit": COMMIT, "files": [{"path": "../../out", "num_bytes": 1, "digest": "a" * 40}]},
        {"commit": COMMIT, "files": [{"path": "config.json", "num_bytes": 1, "digest": "../x"}]},
        {"commit": COMMIT, "files": [{"path": "config.json", "num_bytes": -1, "digest": "a" * 40}]},
        {"files": 3},
    ],
)
def test_listing_that_leads_out_of_the_cache_is_rejected(
    share: Callable[..., FakeNeighbour], client: Client, listing: Any
) -> None:
    neighbour = share()
    neighbour.listing = listing
    with pytest.raises(HubError, match="listing that cannot be used"):
        client.resolve(None, sources=sources(neighbour))


def test_neighbours_that_are_down_only_mean_the_hub(start_hub: StartHub, client: Client) -> None:
    down = Neighbour(name="down", url="http://127.0.0.1:9")
    path = client.resolve(start_hub(MODEL), sources=FileSources((down,)))
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    with pytest.raises(HubUnreachable):
        Client(client.cache / "other").resolve(None, sources=FileSources((down,)))


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize("neighbours", [(), (Neighbour(name="gone", url="http://127.0.0.1:1"),)])
def test_copy_of_a_path_that_no_node_has_is_not_said_to_be_on_the_hub(
    tmp_path: Path, neighbours: tuple[Neighbour, ...]
) -> None:
    source, sources = repository_of("/models/theirs") or "", FileSources(neighbours)
    with pytest.raises(HubError, match=r"no other node has it|no node that has .* can be reached") as raised:
        resolve(source, progress=lambda *_: None, cancelled=lambda: False, cache_dir=tmp_path, sources=sources)
    assert "offline" not in str(raised.value)
    assert "hub" not in str(raised.value)
