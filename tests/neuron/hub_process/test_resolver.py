"""Which files of a model are used: local, cached or downloaded, and what is rejected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from cortex.neuron.hub_process.service import fetch_listing
from cortex.neuron.weights.checkpoint import open_checkpoint
from cortex.neuron.weights.errors import FilesMissing, HubError, HubUnreachable, NoDiskSpace, NotOnHub

from .hub_client import COMMIT, MODEL, WANTED, WEIGHTS, Client, StartHub


def test_downloads_only_the_files_that_the_model_needs(start_hub: StartHub, client: Client) -> None:
    path = client.resolve(start_hub(MODEL))
    assert {found.name for found in path.iterdir()} == WANTED
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    checkpoint = open_checkpoint(path)
    assert bytes(checkpoint.read("w").numpy()) == WEIGHTS[-1_000_000:]
    total = sum(len(MODEL[name]) for name in WANTED)
    assert client.reports[-1] == (total, total)
    assert client.reports == sorted(client.reports)
    assert not client.partials()


def test_official_client_finds_the_downloaded_files(start_hub: StartHub, client: Client) -> None:
    path = client.resolve(start_hub(MODEL))
    found = huggingface_hub.try_to_load_from_cache("org/model", "model.safetensors", cache_dir=client.cache)
    assert found == str(path / "model.safetensors")
    assert path == client.cache / "models--org--model" / "snapshots" / COMMIT
    assert (path / "config.json").is_symlink()


def test_official_client_reads_the_same_listing_and_downloads_the_same_files(
    start_hub: StartHub, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the fake hub gets wrong about the real one, the client that was written for the real one finds."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    hub = start_hub(MODEL, redirect_to=start_hub(MODEL).endpoint)
    official = huggingface_hub.HfApi(endpoint=hub.endpoint, token=False)
    info = official.model_info("org/model", revision="main", files_metadata=True)
    listing = fetch_listing(hub.endpoint, "org/model", "main")
    theirs = {
        file.rfilename: (file.size, file.lfs.sha256 if file.lfs else file.blob_id) for file in info.siblings or ()
    }
    assert {file.path: (file.num_bytes, file.digest) for file in listing.files.values()} == theirs
    assert listing.commit == info.sha
    ours = client.resolve(hub)
    for name in WANTED:
        found = official.hf_hub_download("org/model", name, cache_dir=tmp_path / "theirs")
        assert Path(found).read_bytes() == (ours / name).read_bytes()
        assert Path(found).resolve().name == (ours / name).resolve().name  # the digest


def test_does_not_download_cached_files_again(start_hub: StartHub, client: Client) -> None:
    hub = start_hub(MODEL)
    first = client.resolve(hub)
    hub.requests.clear()
    assert client.resolve(hub) == first
    assert not hub.contents_requests()
    total = client.reports[-1][1]
    assert client.reports[-1] == (total, total)


def test_uses_the_cache_when_the_hub_fails(start_hub: StartHub, client: Client) -> None:
    hub = start_hub(MODEL)
    path = client.resolve(hub)
    assert client.resolve(None) == path
    assert client.resolve(None, offline=True) == path
    assert client.resolve(None, environment={"HF_HUB_OFFLINE": "1"}) == path
    assert client.resolve(None, f"org/model@{COMMIT}") == path
    for status in (401, 404, 500):
        hub.listing_status = status
        assert client.resolve(hub) == path


def test_ignores_an_incomplete_model_in_the_cache(start_hub: StartHub, client: Client) -> None:
    path = client.resolve(start_hub(MODEL))
    (path / "model.safetensors").resolve().unlink()
    with pytest.raises(HubUnreachable):
        client.resolve(None)


def test_error_names_the_missing_shard(start_hub: StartHub, client: Client) -> None:
    shards = {f"model-0000{n}-of-00002.safetensors": b"%d" % n for n in (1, 2)}
    index = b'{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    path = client.resolve(start_hub({"config.json": b"{}", "model.safetensors.index.json": index, **shards}))
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(HubUnreachable, match="model-00002-of-00002"):
        client.resolve(None)


def test_cached_shards_without_an_index_are_incomplete(start_hub: StartHub, client: Client) -> None:
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


def test_sends_no_request_when_offline(start_hub: StartHub, client: Client) -> None:
    hub = start_hub(MODEL)
    with pytest.raises(HubUnreachable, match="offline"):
        client.resolve(hub, offline=True)
    assert not hub.requests


@pytest.mark.usefixtures("real_process")
def test_sends_the_token_to_the_hub_but_not_to_a_redirect_target(start_hub: StartHub, client: Client) -> None:
    cdn = start_hub(MODEL)
    hub = start_hub(MODEL, token="hf_secret", redirect_to=cdn.endpoint)
    client.resolve(hub, environment={"HF_TOKEN": "hf_secret"})
    assert cdn.requests
    assert all("authorization" not in headers for _, headers in cdn.requests)
    with pytest.raises(NotOnHub, match="HF_TOKEN"):
        client.resolve(hub, cache_dir=client.cache / "other")
    (client.cache / "token").write_text("hf_secret\n")
    client.resolve(hub, cache_dir=client.cache / "another")
    client.resolve(hub, cache_dir=client.cache / "third", environment={"HF_TOKEN": "hf_secret"})


def test_rejects_a_token_that_no_header_can_carry(start_hub: StartHub, client: Client) -> None:
    with pytest.raises(HubError, match="set HF_TOKEN to one token"):
        client.resolve(start_hub(MODEL), environment={"HF_TOKEN": "hf_one\nhf_two"})


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "RepoNotFound", "check the name"),
        (404, "RepoNotFound", "check the name"),
        (403, "GatedRepo", "accept its terms"),
        (404, "RevisionNotFound", "revision"),
    ],
)
def test_rejection_by_the_hub_says_what_to_do(
    start_hub: StartHub, client: Client, status: int, code: str, message: str
) -> None:
    with pytest.raises(NotOnHub, match=message):
        client.resolve(start_hub(MODEL, listing_status=status, listing_headers={"x-error-code": code}))


@pytest.mark.parametrize(
    ("headers", "moment"),
    [
        ({"retry-after": "7000"}, "in 7000 s"),
        ({"ratelimit": '"api";r=0;t=299', "ratelimit-policy": '"fixed window";"api";q=500;w=300'}, "in 299 s"),
        ({}, "later"),
    ],
)
def test_too_many_requests_says_when_to_try_again(
    start_hub: StartHub, client: Client, headers: dict[str, str], moment: str
) -> None:
    hub = start_hub(MODEL, listing_status=429, listing_headers=headers)
    with pytest.raises(HubUnreachable, match=f"too many requests, 429.; try again {moment}, or set HF_TOKEN"):
        client.resolve(hub)
    assert len(hub.requests) == (1 if headers else 3)


def test_follows_the_redirect_of_a_renamed_repository(start_hub: StartHub, client: Client) -> None:
    hub = start_hub(MODEL, renamed_from="old/name")
    path = client.resolve(hub, "old/name")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert client.resolve(None, "old/name") == path


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
        {"sha": 1, "siblings": []},
        {"sha": COMMIT, "siblings": 5},
        {"sha": COMMIT, "siblings": [{"rfilename": 5, "size": 1, "blobId": "0" * 40}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "a\0.gguf", "size": 1, "blobId": "0" * 40}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "\ud800.gguf", "size": 1, "blobId": "0" * 40}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "a.gguf", "size": 1 << 70, "blobId": "0" * 40}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "a.gguf", "size": 1, "blobId": 7}]},
        {"sha": COMMIT, "siblings": [{"rfilename": "a.gguf", "lfs": "yes"}]},
    ],
    ids=range(18),
)
def test_rejects_an_endpoint_that_does_not_respond_like_a_hub(
    start_hub: StartHub, client: Client, listing: Any
) -> None:
    with pytest.raises(HubError, match="HF_ENDPOINT"):
        client.resolve(start_hub({}, listing_override=listing))
    assert not client.cache.exists()


def test_rejects_a_model_larger_than_the_disk_before_downloading(start_hub: StartHub, client: Client) -> None:
    hub = start_hub(MODEL, sizes={"model.safetensors": 1 << 60})
    with pytest.raises(NoDiskSpace, match="HF_HUB_CACHE"):
        client.resolve(hub)
    assert not hub.contents_requests()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_cache_is_a_hub_error(start_hub: StartHub, client: Client) -> None:
    client.cache.mkdir()
    client.cache.chmod(0o500)
    with pytest.raises(HubError, match="check permissions"):
        client.resolve(start_hub(MODEL))


def test_downloads_a_new_commit_and_keeps_the_old_one(start_hub: StartHub, client: Client) -> None:
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


def test_returns_a_local_path_unchanged(tmp_path: Path, client: Client) -> None:
    (tmp_path / "model.gguf").touch()
    assert client.resolve(None, str(tmp_path)) == tmp_path
    assert client.resolve(None, str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    (tmp_path / "m-Q4_K_M.gguf").touch()
    assert client.resolve(None, str(tmp_path), quant="int4") == tmp_path / "m-Q4_K_M.gguf"
    assert client.resolve(None, str(tmp_path), quant="q8") == tmp_path


@pytest.mark.parametrize(
    "source",
    ["", "/absent/model", "one-word", "a/b/c", "../absent", "org/..", "org/name:", "org/name@../x", "org/a\0b"],
)
def test_rejects_a_source_that_is_neither_path_nor_hub_id(client: Client, source: str) -> None:
    with pytest.raises(FilesMissing, match="name a model directory"):
        client.resolve(None, source)


@pytest.mark.usefixtures("real_process")
def test_uses_the_proxy_of_the_environment(
    start_hub: StartHub, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = start_hub(MODEL)
    monkeypatch.setenv("http_proxy", hub.endpoint.replace("http://", "http://user:p%40ss@"))
    path = client.resolve(hub, environment={"HF_ENDPOINT": "http://hub.invalid/"})
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert {headers["host"] for _, headers in hub.requests} == {"hub.invalid"}
    assert {headers["proxy-authorization"] for _, headers in hub.requests} == {"Basic dXNlcjpwQHNz"}


def test_rejects_redirect_loops_and_redirects_out_of_http(start_hub: StartHub, client: Client) -> None:
    hub = start_hub({"cdn/x": b"", "model-Q4_0.gguf": WEIGHTS})
    for target in ("ftp://hub.invalid", "file:///etc"):
        hub.redirect_to = target
        with pytest.raises(HubError, match=r"unsupported protocol.*check the network or HF_ENDPOINT"):
            client.resolve(hub)
    hub.redirect_to = f"{hub.endpoint}/{hub.repository}/resolve/{hub.commit}"
    with pytest.raises(HubError, match="redirect"):
        client.resolve(hub)


MIXED = {"config.json": b"{}", "model.safetensors": b"dense", "m-Q8_0.gguf": b"eight", "m-Q4_K_M.gguf": b"four"}


@pytest.mark.parametrize(
    ("files", "quant", "entry"),
    [
        (MIXED, "int4", "m-Q4_K_M.gguf"),
        (MIXED, "q8", "m-Q8_0.gguf"),
        (MIXED, "q6k", ""),
        (MIXED, None, ""),
        ({"m-Q8_0.gguf": b"eight"}, None, "m-Q8_0.gguf"),
    ],
)
def test_quantisation_selects_a_gguf_or_the_dense_weights_that_are_quantised_at_load(
    start_hub: StartHub, client: Client, files: dict[str, bytes], quant: str | None, entry: str
) -> None:
    hub = start_hub(files)
    found = client.resolve(hub, quant=quant)
    assert found == client.cache / "models--org--model" / "snapshots" / COMMIT / entry
    assert client.resolve(None, quant=quant) == client.resolve(None, quant=quant, offline=True) == found
    if quant is not None:
        assert client.resolve(hub, f"org/model:{quant}") == found


@pytest.mark.parametrize(
    ("files", "quant", "reason"),
    [
        (MIXED, "q2", "has no q2, and not so; the nearest is org/model:Q4_K_M"),
        ({"model.safetensors": b"dense"}, "q2", "has no q2, and not so"),
        ({"m-Q8_0.gguf": b"eight"}, "q4", "has no q4; the nearest is org/model:Q8_0"),
        ({"m-Q8_0-00001-of-00002.gguf": b"one"}, "q8", "lacks m-Q8_0-00002-of-00002.gguf, a part of the model"),
    ],
)
def test_nothing_is_downloaded_for_a_quantisation_that_the_repository_cannot_give(
    start_hub: StartHub, client: Client, files: dict[str, bytes], quant: str, reason: str
) -> None:
    hub = start_hub(files)
    with pytest.raises(NotOnHub, match=reason):
        client.resolve(hub, quant=quant, objection=lambda wanted: "not so" if wanted == "q2" else None)
    assert not hub.contents_requests()
