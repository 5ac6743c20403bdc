"""Facts are the same on both sides of the inspection process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from faulty_models import write_model

from cortex.neuron.node.inspection_process import reading
from cortex.neuron.node.inspection_process.reading import Read, read_metadata_of
from cortex.wire.errors import LoadFailed

from ...models.gguf_builds import reference_of
from ...models.gguf_models import write_gguf

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"


def same(read: Read) -> None:
    here = read_metadata_of(read)
    assert values(reading.unpack_metadata(reading.pack_metadata(here), read)) == values(here)


def values(metadata: Any) -> dict[str, Any]:
    fields = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)}
    architecture = fields.pop("architecture")
    return fields | {"layers": architecture.layers, "sizes": architecture.config, "raw": architecture.raw}


def test_dense_model(tmp_path: Path) -> None:
    write_model(tmp_path)
    same(Read(str(tmp_path), "m", None, 1))
    same(Read(str(tmp_path), "m", "q8", 1))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_mixed_gguf(tmp_path: Path, num_ranks: int) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3moe", reference_of("qwen3moe"), ("Q8_0", "Q4_0", "F16"))
    same(Read(str(tmp_path / "m.gguf"), "m", None, num_ranks))


def test_config_inside_another_one(tmp_path: Path) -> None:
    """A family may read its sizes from a part of the config."""
    inner = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    inner |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
    write_model(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text()) | inner
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    same(Read(str(tmp_path), "m", None, 1))


def test_config_that_is_far_too_large_is_rejected(tmp_path: Path) -> None:
    write_model(tmp_path, config={"junk": "x" * (reading.MAX_CONFIG_BYTES + 1)})
    with pytest.raises(LoadFailed, match=r"the config of .* takes more than 2 MiB"):
        reading.pack_metadata(read_metadata_of(Read(str(tmp_path), "m", None, 1)))


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
    assert reading.find_local("org/m", str(tmp_path), None) == str(snapshot)
    (snapshot / INDEX).write_bytes(b"[]")
    with pytest.raises(LoadFailed, match=r"org/m is damaged: .*index\.json.*; delete its files"):
        reading.find_local("org/m", str(tmp_path), None)
    (snapshot / SHARD).unlink()
    (snapshot / INDEX).unlink()
    assert reading.find_local("org/m", str(tmp_path), None) is None
