from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.weights.checkpoint import TensorInfo, open_checkpoint
from cortex.neuron.weights.errors import CheckpointError, FilesMissing, Malformed, TensorMissing

Directory = Callable[..., Path]


def test_single_file_model_is_read_as_written(model_directory: Directory) -> None:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.tensor(2.0), "d": torch.empty(3, 0)}
    config = {"model_type": "x", "text_config": {"hidden_size": 4}}
    checkpoint = open_checkpoint(model_directory(tensors, config=config))

    assert checkpoint.config == config
    assert checkpoint.tensors["a"] == TensorInfo((3, 4), "F32", 48)
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_tensors_share_the_mapped_file_and_outlive_the_checkpoint(model_directory: Directory) -> None:
    checkpoint = open_checkpoint(model_directory({"a": torch.arange(8.0)}))
    first, second = checkpoint.read("a"), checkpoint.read("a")
    assert first.data_ptr() == second.data_ptr()
    checkpoint.close()
    checkpoint.close()
    assert torch.equal(first, torch.arange(8.0))


def test_unaligned_header_gives_aligned_tensors(
    model_directory: Directory, write_safetensors_bytes: Callable[[Any, bytes], bytes]
) -> None:
    directory = model_directory({})
    for padding in range(4):
        header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode() + b" " * padding
        data = torch.tensor([1.5, -2.0]).numpy().tobytes()
        (directory / "model.safetensors").write_bytes(write_safetensors_bytes(header, data))
        read = open_checkpoint(directory).read("a")
        assert read.data_ptr() % 4 == 0
        assert read.tolist() == [1.5, -2.0]


def test_shards_are_merged_into_one_model(model_directory: Directory) -> None:
    checkpoint = open_checkpoint(model_directory({"a": torch.ones(2)}, {"b": torch.zeros(3)}))
    assert set(checkpoint.tensors) == {"a", "b"}
    assert checkpoint.read("b").tolist() == [0, 0, 0]


def _with_last(tensor: torch.Tensor, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[-1, -1] = value
    return changed


_EMBEDDING = torch.randn(3_000, 200, dtype=torch.bfloat16)  # more than one piece of the comparison


@pytest.mark.parametrize("embedding", ["model.embed_tokens.weight", "model.language_model.embed_tokens.weight"])
@pytest.mark.parametrize(
    ("head", "is_tied"),
    [
        (_EMBEDDING, True),
        (_with_last(_EMBEDDING, 9.0), False),
        (_EMBEDDING.float(), False),
        (_EMBEDDING.view(200, 3_000), False),
    ],
    ids=["equal", "one value differs", "another dtype", "another shape"],
)
@pytest.mark.parametrize("stated", [{"tie_word_embeddings": True}, {"tie_embedding": True}, {}])
def test_stored_output_matrix_is_used_unless_it_equals_the_embedding(
    model_directory: Directory, embedding: str, head: torch.Tensor, is_tied: bool, stated: dict[str, bool]
) -> None:
    config = {"model_type": "llama", **stated}
    path = model_directory({embedding: _EMBEDDING}, {"lm_head.weight": head}, config=config)
    with closing(open_checkpoint(path)) as checkpoint:
        untied = {"model_type": "llama", "tie_word_embeddings": False}
        assert checkpoint.config == (config if is_tied else untied)


def test_error_names_the_missing_tensor(model_directory: Directory) -> None:
    with pytest.raises(TensorMissing, match="nope"):
        open_checkpoint(model_directory({})).read("nope")


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "..",
        "",
        "a\\b",
        "a\0b",
        "\ud800",
        "link.safetensors",
    ],
)
def test_rejects_an_index_that_leads_out_of_the_directory(
    model_directory: Directory, tmp_path: Path, shard: str
) -> None:
    directory = model_directory({"a": torch.ones(1)})
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    (directory / "link.safetensors").symlink_to(tmp_path / "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(Malformed):
        open_checkpoint(directory)


def test_hub_cache_snapshot_may_link_only_to_its_own_blobs(model_directory: Directory, tmp_path: Path) -> None:
    source = model_directory({"a": torch.ones(1)})
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (repository / "blobs" / f"digest-of-{name}").write_bytes((source / name).read_bytes())
        (snapshot / name).symlink_to(f"../../blobs/digest-of-{name}")
    assert open_checkpoint(snapshot).read("a").tolist() == [1]

    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../model/config.json")
    with pytest.raises(Malformed, match="outside"):
        open_checkpoint(snapshot)


def test_opens_a_symlinked_model_directory(model_directory: Directory, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model_directory({"a": torch.ones(1)}))
    assert open_checkpoint(tmp_path / "link").read("a").tolist() == [1]


def missing_shard(directory: Path) -> None:
    (directory / "model-00002-of-00002.safetensors").unlink()


def promised_tensor(directory: Path) -> None:
    index = {"weight_map": {"z": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def no_weight_map(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("{}")


def weight_map_of_numbers(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')


def no_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").unlink()


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def config_not_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def config_a_directory(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()


def link_to_itself(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("config.json")


def truncated_shard(directory: Path) -> None:
    shard = directory / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage",
    [
        missing_shard,
        promised_tensor,
        no_weight_map,
        weight_map_of_numbers,
        no_index,
        no_config,
        config_not_json,
        config_a_directory,
        link_to_itself,
        truncated_shard,
    ],
    ids=lambda damage: damage.__name__,
)
def test_rejects_a_damaged_directory_with_a_one_line_error(
    model_directory: Directory, damage: Callable[[Path], None]
) -> None:
    directory = model_directory({"a": torch.ones(2)}, {"b": torch.ones(2)})
    damage(directory)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert "\n" not in str(caught.value)


def test_path_without_a_model_raises_files_missing(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / "absent.gguf"):
        with pytest.raises(FilesMissing):
            open_checkpoint(path)


def test_rejects_a_directory_with_several_gguf_models_and_lists_them(tmp_path: Path) -> None:
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf", "mmproj-f16.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(FilesMissing, match=r"a-Q4_0\.gguf, a-Q8_0\.gguf$"):
        open_checkpoint(tmp_path)


def test_failed_opens_leak_no_descriptors(model_directory: Directory) -> None:
    directory = model_directory({"a": torch.ones(2)}, {"b": torch.ones(2)})
    truncated_shard(directory)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        with pytest.raises(CheckpointError):
            open_checkpoint(directory)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
