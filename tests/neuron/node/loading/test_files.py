"""Models that are on disk, and that are not or only seem to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.neuron.node.loading.files import find_local
from cortex.wire.errors import LoadFailed

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"


def cached(hub: Path, index: bytes) -> Path:
    folder = hub / "models--org--m"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    for name, content in {"config.json": b"{}", SHARD: b"", INDEX: index}.items():
        (snapshot / name).write_bytes(content)
    return snapshot


def test_model_whose_index_cannot_be_read_is_damaged_and_not_absent(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, b'{"weight_map": {"a": "%s"}}' % SHARD.encode())
    assert find_local("org/m", tmp_path, None) == snapshot
    (snapshot / INDEX).write_bytes(b"[]")
    with pytest.raises(LoadFailed, match=r"org/m is damaged: .*index\.json.*; delete its files"):
        find_local("org/m", tmp_path, None)
    (snapshot / SHARD).unlink()
    (snapshot / INDEX).unlink()
    assert find_local("org/m", tmp_path, None) is None
