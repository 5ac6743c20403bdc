from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from cortex.neuron.weights.checkpoint import open_checkpoint
from cortex.neuron.weights.errors import (
    Cancelled,
    DiskFull,
    DownloadCorrupt,
    FilesMissing,
    HubError,
    HubUnreachable,
    NotOnHub,
)
from cortex.neuron.weights.hub import resolve

StartHub = Callable[..., Any]

COMMIT = "c0ffee" + "0" * 34
WEIGHTS = (
    struct.pack("<Q", 66)
    + b'{"w":{"dtype":"U8","shape":[1000000],"data_offsets":[0,1000000]}} '
    + os.urandom(1_000_000)
)
MODEL = {
    "README.md": b"# a model",
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"other",
}
WANTED = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}


class Client:
    """Resolves against a fake hub and remembers the progress it was shown."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.reports: list[tuple[int, int]] = []

    def resolve(self, hub: Any, source: str = "org/model", **options: Any) -> Path:
        arguments: dict[str, Any] = {
            "cache_dir": self.cache,
            "endpoint": hub.endpoint if hub else "http://127.0.0.1:9",
            "cancelled": lambda: False,
            "environment": {"HF_HOME": str(self.cache)},
        }
        return resolve(source, progress=lambda *report: self.reports.append(report), **(arguments | options))

    def partials(self) -> list[Path]:
        return list(self.cache.rglob("*.incomplete"))


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path / "cache")


def cut_after(num_bytes: int) -> Callable[[Any, bytes], bytes]:
    """Promise everything, send a part, hang up."""
    return lambda handler, data: data[:num_bytes]


def corrupt(handler: Any, data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def send_too_much(handler: Any, data: bytes) -> bytes:
    return data + b"and more than was promised"


def reset_connection(handler: Any, data: bytes) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def unavailable(handler: Any, data: bytes) -> None:
    handler.answer(503, b"later")


def wrong_range(handler: Any, data: bytes) -> None:
    handler.answer(206, data, {"content-range": "bytes 5-10/11"})


def stall(handler: Any, data: bytes) -> None:
    handler.send_response(206)
    handler.send_header("content-length", str(len(data)))
    handler.send_header("content-range", f"bytes 0-{len(data) - 1}/{len(data)}")
    handler.end_headers()
    handler.wfile.write(data[:10])
    handler.wfile.flush()
    handler.hub.stalled.set()
    handler.hub.release.wait(60)


def test_a_model_is_fetched_with_what_it_needs_and_nothing_else(start_hub: StartHub, client: Client) -> None:
    path = client.resolve(start_hub(MODEL))
    assert {found.name for found in path.iterdir()} == WANTED
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    checkpoint = open_checkpoint(path)
    assert bytes(checkpoint.read("w").numpy()) == WEIGHTS[-1_000_000:]
    total = sum(len(MODEL[name]) for name in WANTED)
    assert client.reports[-1] == (total, total)
    assert client.reports == sorted(client.reports)
    assert not client.partials()


def test_the_official_client_finds_what_we_fetched(start_hub: StartHub, client: Client) -> None:
    path = client.resolve(start_hub(MODEL))
    found = huggingface_hub.try_to_load_from_cache("org/model", "model.safetensors", cache_dir=client.cache)
    assert found == str(path / "model.safetensors")
    assert path == client.cache / "models--org--model" / "snapshots" / COMMIT
    assert (path / "config.json").is_symlink()


def test_what_is_there_is_not_fetched_again(start_hub: StartHub, client: Client) -> None:
    hub = start_hub(MODEL)
    first = client.resolve(hub)
    hub.requests.clear()
    assert client.resolve(hub) == first
    assert not hub.contents_requests()
    total = client.reports[-1][1]
    assert client.reports[-1] == (total, total)


@pytest.mark.parametrize(
    "fault",
    [cut_after(0), cut_after(100_000), reset_connection, unavailable, wrong_range, send_too_much],
    ids=["hangs-up", "cut", "reset", "503", "wrong-range", "too-much"],
)
def test_a_download_survives(start_hub: StartHub, client: Client, fault: Callable[[Any, bytes], Any]) -> None:
    hub = start_hub({"config.json": b"{}", "model.safetensors": WEIGHTS})
    hub.faults = [fault] * 3
    path = client.resolve(hub)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert client.reports == sorted(client.reports)


def test_a_failed_download_is_continued_by_the_next_call(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS})
    hub.faults = [cut_after(400_000)] + [cut_after(0)] * 6
    with pytest.raises(HubUnreachable, match="byte 400000 of 1000074"):
        client.resolve(hub)
    assert [partial.stat().st_size for partial in client.partials()] == [400_000]
    hub.requests.clear()
    assert client.resolve(hub).read_bytes() == WEIGHTS
    assert [headers["range"] for _, headers in hub.contents_requests()] == ["bytes=400000-1000073"]
    assert not client.partials()


def test_a_server_without_ranges_is_asked_from_the_start(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, ignores_ranges=True)
    hub.faults = [cut_after(400_000), cut_after(200_000)]
    assert client.resolve(hub).read_bytes() == WEIGHTS
    assert client.reports == sorted(client.reports)


def test_a_corrupt_partial_file_is_noticed_and_fetched_anew(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS})
    hub.faults = [cut_after(400_000)] + [cut_after(0)] * 6
    with pytest.raises(HubUnreachable):
        client.resolve(hub)
    client.partials()[0].write_bytes(b"x" * 500_000)
    assert client.resolve(hub).read_bytes() == WEIGHTS


def test_a_partial_file_that_is_too_long_is_thrown_away(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS})
    blobs = client.cache / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hub.sibling('model-Q4_0.gguf', WEIGHTS)['lfs']['sha256']}.incomplete").write_bytes(b"x" * 2_000_000)
    assert client.resolve(hub).read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_bytes_that_do_not_match_their_digest_are_never_shown(start_hub: StartHub, client: Client, name: str) -> None:
    hub = start_hub(MODEL, digests={name: "0" * (64 if name.endswith("safetensors") else 40)})
    with pytest.raises(DownloadCorrupt, match=name):
        client.resolve(hub)
    assert not list(client.cache.rglob(f"snapshots/*/{name}"))
    assert not [partial for partial in client.partials() if partial.name.startswith("0000")]
    with pytest.raises(HubUnreachable):
        client.resolve(None)


def test_one_corrupted_transfer_is_repaired(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, faults=[corrupt])
    assert client.resolve(hub).read_bytes() == WEIGHTS


@pytest.mark.parametrize("size", [999_999, 2_000_000])
def test_a_listing_that_lies_about_lengths_ends_in_an_error(start_hub: StartHub, client: Client, size: int) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, sizes={"model-Q4_0.gguf": size})
    with pytest.raises(HubError, match=r"digest|stops at byte"):
        client.resolve(hub)


def test_the_cache_serves_when_the_hub_does_not(start_hub: StartHub, client: Client) -> None:
    hub = start_hub(MODEL)
    path = client.resolve(hub)
    assert client.resolve(None) == path
    assert client.resolve(None, offline=True) == path
    assert client.resolve(None, environment={"HF_HUB_OFFLINE": "1"}) == path
    assert client.resolve(None, f"org/model@{COMMIT}") == path
    for status in (401, 404, 500):
        hub.listing_status = status
        assert client.resolve(hub) == path


def test_an_incomplete_model_in_the_cache_does_not_count(start_hub: StartHub, client: Client) -> None:
    path = client.resolve(start_hub(MODEL))
    (path / "model.safetensors").resolve().unlink()
    with pytest.raises(HubUnreachable):
        client.resolve(None)


def test_a_missing_shard_is_named(start_hub: StartHub, client: Client) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": b"%d" % n for n in (1, 2)}
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    path = client.resolve(start_hub({"config.json": b"{}", "model.safetensors.index.json": index, **shards}))
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(HubUnreachable, match="model-00002-of-00002"):
        client.resolve(None)


def test_shards_without_their_index_are_no_model(start_hub: StartHub, client: Client) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": b"%d" % n for n in (1, 2)}
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    hub = start_hub({"config.json": b"{}", "model.safetensors.index.json": index, **shards})
    path = client.resolve(hub)
    (path / "model.safetensors.index.json").unlink()
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(HubUnreachable, match=r"index\.json"):
        client.resolve(None)
    assert client.resolve(hub) == path
    assert (path / "model-00002-of-00002.safetensors").exists()


def test_nothing_is_asked_of_the_network_when_offline(start_hub: StartHub, client: Client) -> None:
    hub = start_hub(MODEL)
    with pytest.raises(HubUnreachable, match="offline"):
        client.resolve(hub, offline=True)
    assert not hub.requests


def test_the_token_is_sent_to_the_hub_and_not_to_its_content_network(start_hub: StartHub, client: Client) -> None:
    cdn = start_hub(MODEL)
    hub = start_hub(MODEL, token="hf_secret", redirect_to=cdn.endpoint)
    client.resolve(hub, token="hf_secret")
    assert cdn.requests
    assert all("authorization" not in headers for _, headers in cdn.requests)
    with pytest.raises(NotOnHub, match="HF_TOKEN"):
        client.resolve(hub, cache_dir=client.cache / "other")
    (client.cache / "token").write_text("hf_secret\n")
    client.resolve(hub, cache_dir=client.cache / "another")
    client.resolve(hub, cache_dir=client.cache / "third", environment={"HF_TOKEN": "hf_secret"})


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "check the name"),
        (403, "GatedRepo", "accept its terms"),
        (404, "RevisionNotFound", "revision"),
    ],
)
def test_a_refusal_says_what_to_do(start_hub: StartHub, client: Client, status: int, code: str, message: str) -> None:
    with pytest.raises(NotOnHub, match=message):
        client.resolve(start_hub(MODEL, listing_status=status, listing_error_code=code))


@pytest.mark.parametrize(
    "listing",
    [
        [],
        {"sha": COMMIT},
        {"sha": "../../etc", "siblings": []},
        {"sha": COMMIT, "siblings": [{"rfilename": "a.gguf"}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "../a.gguf", "size": 1, "blobId": "0" * 40}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "/a.gguf", "size": 1, "blobId": "0" * 40}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "a.gguf", "size": 1, "blobId": "../../../evil"}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "a.gguf", "size": -1, "blobId": "0" * 40}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "a.gguf", "lfs": {"sha256": "x", "size": 1}}]},
        {"sha": COMMIT, "siblings": [None]},
    ],
    ids=range(10),
)
def test_an_endpoint_that_is_no_hub_is_refused(start_hub: StartHub, client: Client, listing: Any) -> None:
    with pytest.raises(HubError, match="HF_ENDPOINT"):
        client.resolve(start_hub({}, listing_override=listing))
    assert not client.cache.exists()


def test_a_model_that_does_not_fit_the_disk_is_refused_before_a_byte_is_fetched(
    start_hub: StartHub, client: Client
) -> None:
    hub = start_hub(MODEL, sizes={"model.safetensors": 1 << 60})
    with pytest.raises(DiskFull, match="HF_HUB_CACHE"):
        client.resolve(hub)
    assert not hub.contents_requests()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_cache_that_cannot_be_written_is_an_error_of_one_line(start_hub: StartHub, client: Client) -> None:
    client.cache.mkdir()
    client.cache.chmod(0o500)
    with pytest.raises(HubError, match="check permissions"):
        client.resolve(start_hub(MODEL))


def test_a_stalled_download_can_be_called_off_at_once(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, faults=[stall])
    called_off_at = 0.0

    def cancelled() -> bool:
        nonlocal called_off_at
        if hub.stalled.is_set() and not called_off_at:
            called_off_at = time.monotonic()
        return called_off_at > 0

    with pytest.raises(Cancelled):
        client.resolve(hub, cancelled=cancelled)
    assert time.monotonic() - called_off_at < 30  # the download would stall for longer
    deadline = time.monotonic() + 30
    while any(thread.name.startswith("hub") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    hub.release.set()
    assert client.resolve(hub).read_bytes() == WEIGHTS


def test_two_at_once_fetch_a_file_once(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, faults=[cut_after(300_000), cut_after(100_000)])
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(Client(client.cache).resolve(hub))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(paths) == 4
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == WEIGHTS
    assert len(hub.contents_requests()) == 3


def test_a_new_commit_is_fetched_and_the_old_one_kept(start_hub: StartHub, client: Client) -> None:
    hub = start_hub(dict(MODEL))
    first = client.resolve(hub)
    hub.commit = "beef" + "0" * 36
    hub.files["config.json"] = b'{"model_type": "qwen3"}'
    hub.requests.clear()
    second = client.resolve(hub)
    assert second != first
    assert len(hub.contents_requests()) == 1
    assert open_checkpoint(first).config == {"model_type": "llama"}
    assert open_checkpoint(second).config == {"model_type": "qwen3"}


def test_a_local_path_is_itself(tmp_path: Path, client: Client) -> None:
    (tmp_path / "model.gguf").touch()
    assert client.resolve(None, str(tmp_path)) == tmp_path
    assert client.resolve(None, str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"


@pytest.mark.parametrize(
    "source",
    ["", "/absent/model", "one-word", "a/b/c", "../absent", "org/..", "org/name:", "org/name@../x", "org/a\0b"],
)
def test_what_names_nothing_is_refused(client: Client, source: str) -> None:
    with pytest.raises(FilesMissing, match="name a model directory"):
        client.resolve(None, source)


def test_the_environments_proxy_is_used(start_hub: StartHub, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = start_hub(MODEL)
    monkeypatch.setenv("http_proxy", hub.endpoint.replace("http://", "http://user:p%40ss@"))
    path = client.resolve(hub, endpoint="http://hub.invalid/")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert {headers["host"] for _, headers in hub.requests} == {"hub.invalid"}
    assert {headers["proxy-authorization"] for _, headers in hub.requests} == {"Basic dXNlcjpwQHNz"}


def test_redirects_in_circles_and_out_of_http_are_refused(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"cdn/x": b"", "model-Q4_0.gguf": WEIGHTS})
    for target in ("ftp://hub.invalid", "file:///etc"):
        hub.redirect_to = target
        with pytest.raises(HubError, match="not an HTTP address"):
            client.resolve(hub)
    hub.redirect_to = f"{hub.endpoint}/{hub.repository}/resolve/{hub.commit}"
    with pytest.raises(HubError, match="circles"):
        client.resolve(hub)
