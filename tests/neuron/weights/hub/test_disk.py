from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cortex.neuron.weights.errors import FilesMissing
from cortex.neuron.weights.hub import disk
from cortex.neuron.weights.hub.resolver import resolve
from cortex.neuron.weights.hub.source import HubSource

if TYPE_CHECKING:
    from ...fake_hub import FakeHub


FILES = {"m-Q4_K_M.gguf": b"4" * 400, "m-Q8_0.gguf": b"8" * 800}


def fetch(hub: Any, cache: Path, quant: str) -> Path:
    return resolve(
        f"org/model:{quant}",
        progress=lambda *_: None,
        cancelled=lambda: False,
        cache_dir=cache,
        endpoint=hub.endpoint,
        environment={},
    )


def test_deleting_one_quantisation_leaves_the_others(start_hub: Callable[..., FakeHub], tmp_path: Path) -> None:
    hub = start_hub(FILES)
    four, eight = fetch(hub, tmp_path, "Q4_K_M"), fetch(hub, tmp_path, "Q8_0")
    assert disk.repository_bytes(tmp_path) == {"org/model": 1200}
    assert disk.delete(tmp_path, HubSource("org/model", quant="q4")) == 400
    assert not four.exists()
    assert eight.read_bytes() == FILES["m-Q8_0.gguf"]
    assert disk.repository_bytes(tmp_path) == {"org/model": 800}
    with pytest.raises(FilesMissing):
        disk.delete(tmp_path, HubSource("org/model", quant="Q4_K_M"))
    assert disk.delete(tmp_path, HubSource("org/model")) == 800
    assert disk.repository_bytes(tmp_path) == {}


def test_nothing_outside_the_cache_is_deleted(start_hub: Callable[..., FakeHub], tmp_path: Path) -> None:
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights.gguf").write_bytes(b"precious")
    cache.mkdir()
    (cache / "models--org--model").symlink_to(elsewhere)
    with pytest.raises(FilesMissing):
        disk.delete(cache, HubSource("org/model"))
    (cache / "models--org--model").unlink()
    path = fetch(start_hub(FILES), cache, "Q4_K_M")
    path.unlink()
    os.symlink(elsewhere / "weights.gguf", path)
    disk.delete(cache, HubSource("org/model", quant="Q4_K_M"))
    assert (elsewhere / "weights.gguf").read_bytes() == b"precious"
