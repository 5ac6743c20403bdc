from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from cortex.neuron.weights.errors import FilesMissing
from cortex.neuron.weights.gguf.towers import projector_of
from cortex.neuron.weights.hub import disk
from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.neuron.weights.hub.listing import RemoteFile
from cortex.neuron.weights.hub.source import HubSource

COMMIT = "c0ffee" + "0" * 34
FILES = {"m-Q4_K_M.gguf": b"4" * 400, "m-Q8_0.gguf": b"8" * 800}


def cached(cache: Path, name: str, content: bytes | None = None) -> Path:
    """A file as a download leaves it in the cache. `content`: None: that of `FILES`."""
    repository = RepositoryCache(cache, "org/model")
    content = FILES[name] if content is None else content
    file = RemoteFile(name, len(content), hashlib.sha256(content).hexdigest())
    repository.blob(file).parent.mkdir(parents=True, exist_ok=True)
    repository.blob(file).write_bytes(content)
    repository.link(COMMIT, file)
    return repository.snapshot(COMMIT) / name


def test_quantisations_share_the_tower_which_goes_with_the_last(tmp_path: Path) -> None:
    names = ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-f16.gguf")
    four, eight, tower = (cached(tmp_path, name, b"t" * 50 if "mmproj" in name else None) for name in names)
    assert projector_of(four) == projector_of(eight) == tower
    assert disk.delete(tmp_path, HubSource("org/model", quant="q4")) == 400
    assert tower.exists()
    assert disk.delete(tmp_path, HubSource("org/model", quant="q8")) == 850
    assert not tower.exists()


def test_a_tower_above_the_folder_of_a_model_is_found(tmp_path: Path) -> None:
    model, tower = (cached(tmp_path, name, b"g") for name in ("Q8_0/m-Q8_0.gguf", "mmproj-f16.gguf"))
    assert projector_of(model) == tower
    plain = tmp_path / "plain" / "q8" / "m.gguf"
    plain.parent.mkdir(parents=True)
    (tmp_path / "plain" / "mmproj.gguf").write_bytes(b"g")
    assert projector_of(plain) is None, "other folders hold files of other models"


def test_deleting_one_quantisation_leaves_the_others(tmp_path: Path) -> None:
    four, eight = (cached(tmp_path, name) for name in FILES)
    assert disk.repository_bytes(tmp_path) == {"org/model": 1200}
    assert disk.delete(tmp_path, HubSource("org/model", quant="q4")) == 400
    assert not four.exists()
    assert eight.read_bytes() == FILES["m-Q8_0.gguf"]
    assert disk.repository_bytes(tmp_path) == {"org/model": 800}
    with pytest.raises(FilesMissing):
        disk.delete(tmp_path, HubSource("org/model", quant="Q4_K_M"))
    assert disk.delete(tmp_path, HubSource("org/model")) == 800
    assert disk.repository_bytes(tmp_path) == {}


def test_nothing_outside_the_cache_is_deleted(tmp_path: Path) -> None:
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights.gguf").write_bytes(b"precious")
    cache.mkdir()
    (cache / "models--org--model").symlink_to(elsewhere)
    with pytest.raises(FilesMissing):
        disk.delete(cache, HubSource("org/model"))
    (cache / "models--org--model").unlink()
    path = cached(cache, "m-Q4_K_M.gguf")
    path.unlink()
    os.symlink(elsewhere / "weights.gguf", path)
    disk.delete(cache, HubSource("org/model", quant="Q4_K_M"))
    assert (elsewhere / "weights.gguf").read_bytes() == b"precious"
