"""Downloads from a hub that cuts, corrupts, stalls or repeats what it sends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import file_download

from cortex.neuron.weights.errors import Cancelled, DownloadCorrupt, HubError, HubUnreachable, NotOnHub

from ...waiting import WAIT_S
from .hub_client import MODEL, WEIGHTS, Client, Sleeps, StartHub


def cut_after(num_bytes: int) -> Callable[[Any, bytes], bytes]:
    """Announce the whole length, send a part, close the connection."""
    return lambda handler, data: data[:num_bytes]


def corrupt(handler: Any, data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def send_too_much(handler: Any, data: bytes) -> bytes:
    return data + b"and more than was announced"


def reset_connection(handler: Any, data: bytes) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def unavailable(handler: Any, data: bytes) -> None:
    handler.respond(503, b"later")


def too_many_requests(handler: Any, data: bytes) -> None:
    handler.respond(429, b"", {"retry-after": "1"})


def gated(handler: Any, data: bytes) -> None:
    handler.respond(403, b"{}", {"x-error-code": "GatedRepo"})


def wrong_range(handler: Any, data: bytes) -> None:
    handler.respond(206, data, {"content-range": "bytes 5-10/11"})


def stall_after(num_bytes: int) -> Callable[[Any, bytes], None]:
    def stall(handler: Any, data: bytes) -> None:
        handler.send_response(200)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:num_bytes])
        handler.wfile.flush()
        handler.hub.stalled.set()
        handler.hub.release.wait(WAIT_S)

    return stall


@pytest.mark.parametrize(
    "fault",
    [cut_after(0), cut_after(100_000), reset_connection, unavailable, wrong_range, send_too_much],
    ids=["hangs-up", "cut", "reset", "503", "wrong-range", "too-much"],
)
def test_download_recovers_from_transfer_faults(
    start_hub: StartHub, client: Client, fault: Callable[[Any, bytes], Any]
) -> None:
    hub = start_hub({"config.json": b"{}", "model.safetensors": WEIGHTS})
    hub.faults = [fault] * 3
    path = client.resolve(hub)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert client.reports == sorted(client.reports)


def test_waits_as_long_as_the_hub_says_after_too_many_requests(
    start_hub: StartHub, client: Client, sleeps: Sleeps
) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, faults=[too_many_requests])
    assert client.resolve(hub).read_bytes() == WEIGHTS
    assert max(sleeps) >= 1


def test_download_that_the_hub_limits_says_what_to_do(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS})
    hub.faults = [cut_after(400_000)] + [lambda handler, data: handler.respond(429, b"")] * 99
    reason = (
        "stops at byte 262144 of 1000074 .too many requests, 429.; try again later, or set HF_TOKEN for a higher limit"
    )
    with pytest.raises(HubUnreachable, match=f"{reason}; the next attempt continues from there"):
        client.resolve(hub)


def test_download_of_a_gated_repository_fails_at_once(start_hub: StartHub, client: Client) -> None:
    """The hub lists the files of such a repository for everyone."""
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, faults=[gated])
    with pytest.raises(NotOnHub, match="accept its terms on the hub and set HF_TOKEN"):
        client.resolve(hub)
    assert len(hub.contents_requests()) == 1


def test_next_call_resumes_a_failed_download(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS})
    hub.faults = [cut_after(400_000)] + [cut_after(0)] * 99
    with pytest.raises(HubUnreachable, match="byte 262144 of 1000074"):
        client.resolve(hub)
    assert [partial.stat().st_size for partial in client.partials()] == [262_144]
    hub.requests.clear()
    hub.faults.clear()
    assert client.resolve(hub).read_bytes() == WEIGHTS
    assert [headers["range"] for _, headers in hub.contents_requests()] == ["bytes=262144-"]
    assert not client.partials()


def test_restarts_from_the_first_byte_when_the_server_ignores_ranges(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, ignores_ranges=True)
    hub.faults = [cut_after(400_000), cut_after(200_000)]
    assert client.resolve(hub).read_bytes() == WEIGHTS
    assert client.reports == sorted(client.reports)


def test_downloads_a_corrupt_partial_file_again(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS})
    hub.faults = [cut_after(400_000)] + [cut_after(0)] * 99
    with pytest.raises(HubUnreachable):
        client.resolve(hub)
    hub.faults.clear()
    client.partials()[0].write_bytes(b"x" * 500_000)
    assert client.resolve(hub).read_bytes() == WEIGHTS


def test_discards_a_partial_file_that_is_too_long(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS})
    blobs = client.cache / "models--org--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hub.sibling('model-Q4_0.gguf', WEIGHTS)['lfs']['sha256']}.incomplete").write_bytes(b"x" * 2_000_000)
    assert client.resolve(hub).read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_never_links_a_file_with_a_wrong_digest(start_hub: StartHub, client: Client, name: str) -> None:
    hub = start_hub(MODEL, digests={name: "0" * (64 if name.endswith("safetensors") else 40)})
    with pytest.raises(DownloadCorrupt, match=name):
        client.resolve(hub)
    assert not list(client.cache.rglob(f"snapshots/*/{name}"))
    assert not [partial for partial in client.partials() if partial.name.startswith("0000")]
    with pytest.raises(HubUnreachable):
        client.resolve(None)


def test_retries_after_one_corrupt_transfer(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, faults=[corrupt])
    assert client.resolve(hub).read_bytes() == WEIGHTS


@pytest.mark.parametrize("size", [999_999, 2_000_000])
def test_wrong_size_in_the_listing_is_an_error(start_hub: StartHub, client: Client, size: int) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, sizes={"model-Q4_0.gguf": size})
    with pytest.raises(HubError, match=r"digest|stops at byte"):
        client.resolve(hub)


def endless(handler: Any, data: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    with contextlib.suppress(OSError):  # the client closes the connection
        while True:
            handler.wfile.write(b"x" * 1_000_000)
    handler.hub.stalled.set()
    handler.close_connection = True


def test_endless_response_is_cut_at_the_listed_size(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, faults=[endless])
    assert client.resolve(hub).read_bytes() == WEIGHTS
    hub.faults.extend([endless] * 2)
    with pytest.raises(DownloadCorrupt, match="size and digest"):
        client.resolve(hub, cache_dir=client.cache / "other")
    assert hub.stalled.wait(WAIT_S)


@pytest.mark.usefixtures("real_process")
def test_cancels_a_stalled_download_at_once_and_keeps_what_it_has(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, faults=[stall_after(600_000)])
    began_s = time.monotonic()

    def cancelled() -> bool:
        return hub.stalled.is_set() and sum(partial.stat().st_size for partial in client.partials()) == 524_288

    with pytest.raises(Cancelled):
        client.resolve(hub, cancelled=cancelled)
    assert time.monotonic() - began_s < WAIT_S  # the download would stall for longer
    hub.release.set()
    hub.requests.clear()
    assert client.resolve(hub).read_bytes() == WEIGHTS
    assert [headers["range"] for _, headers in hub.contents_requests()] == ["bytes=524288-"]
    assert client.reports == sorted(client.reports)


@pytest.mark.usefixtures("real_process")
def test_process_that_is_killed_is_a_clear_error(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, faults=[stall_after(10)])
    children = Path(f"/proc/{os.getpid()}/task")

    def cancelled() -> bool:
        for task in children.iterdir() if hub.stalled.is_set() else ():
            with contextlib.suppress(OSError):  # a thread may end between the listing and the look
                for child in (task / "children").read_text().split():
                    if b"cortex.neuron.hub_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                        os.kill(int(child), signal.SIGKILL)
        return False

    with pytest.raises(HubError, match="has ended"):
        client.resolve(hub, cancelled=cancelled)


def xet_headers(hub: Any) -> dict[str, str]:
    return {"x-xet-hash": "a" * 64, "x-xet-refresh-route": f"{hub.endpoint}/api/models/org/model/xet-read-token/main"}


def test_fetches_over_xet_where_the_hub_offers_it(
    start_hub: StartHub, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = start_hub({"config.json": b"{}", "model.safetensors": WEIGHTS})
    hub.head_headers = xet_headers(hub)
    fetched: list[str] = []

    def xet_get(*, incomplete_path: Path, xet_file_data: Any, headers: Any, expected_size: int) -> None:
        fetched.append(xet_file_data.file_hash)
        assert expected_size == len(WEIGHTS)
        incomplete_path.write_bytes(WEIGHTS)

    monkeypatch.setattr(file_download, "xet_get", xet_get)
    path = client.resolve(hub)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert fetched == ["a" * 64]
    assert [path for path, _ in hub.contents_requests() if path.endswith("safetensors")] == []
    assert not client.partials()


def test_fetches_over_http_where_xet_fails(
    start_hub: StartHub, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = start_hub({"config.json": b"{}", "model.safetensors": WEIGHTS})
    hub.head_headers = xet_headers(hub)

    def xet_get(*, incomplete_path: Path, **_: Any) -> None:
        incomplete_path.write_bytes(b"half")
        raise RuntimeError("the content store is not reachable")

    monkeypatch.setattr(file_download, "xet_get", xet_get)
    assert (client.resolve(hub) / "model.safetensors").read_bytes() == WEIGHTS
    assert not client.partials()


def test_mirror_without_metadata_of_files_is_used(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, head_status=405)
    assert client.resolve(hub).read_bytes() == WEIGHTS


def test_concurrent_calls_download_a_file_once(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"model-Q4_0.gguf": WEIGHTS}, faults=[cut_after(300_000), cut_after(100_000)])
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(Client(client.cache).resolve(hub))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(paths) == 4
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == WEIGHTS
    assert len(hub.contents_requests()) == 3
