"""Parts of stored tensors: they decode to the same values, and only their bytes are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.weights.checkpoint import open_checkpoint
from cortex.neuron.weights.decode import decode, mapped_bytes
from cortex.neuron.weights.errors import TensorMissing, Unsupported
from cortex.neuron.weights.gguf.types import GGMLType
from cortex.neuron.weights.sharded import ShardedCheckpoint, TensorSlice
from cortex.neuron.weights.stored import StoredTensor
from cortex.neuron.weights.transfer import PieceSizes, Placement, load_into

Directory = Callable[..., Path]


def decoded(stored: StoredTensor) -> torch.Tensor:
    return decode(stored, mapped_bytes(stored))


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (TensorSlice(rows=(range(3, 7),)), lambda whole: whole[3:7]),
        (TensorSlice(rows=(range(0, 2), range(5, 6), range(8, 10))), lambda whole: whole[[0, 1, 5, 8, 9]]),
        (TensorSlice(columns=range(2, 6)), lambda whole: whole[:, 2:6]),
        (TensorSlice(), lambda whole: whole),
    ],
)
def test_part_of_a_matrix_is_read_in_pieces_and_nothing_else(
    part: TensorSlice, expected: Any, model_directory: Directory
) -> None:
    matrix = torch.randn(10, 6)
    checkpoint = ShardedCheckpoint(open_checkpoint(model_directory({"w": matrix, "norm": torch.ones(6)})), {"w": part})
    wanted = expected(matrix)
    assert checkpoint.tensors["w"].shape == tuple(wanted.shape)
    read: list[int] = []
    destination = torch.full(wanted.shape, torch.nan)
    load_into(
        checkpoint,
        [Placement("w", destination)],
        progress=lambda _, total: read.append(total),
        cancelled=lambda: False,
        sizes=PieceSizes(num_bytes=50),
    )
    assert torch.equal(destination, wanted)
    assert read[-1] == wanted.numel() * 4
    assert torch.equal(checkpoint.read("norm"), torch.ones(6))


def test_rank_sees_experts_under_its_own_numbers_and_not_those_of_others(model_directory: Directory) -> None:
    whole = open_checkpoint(
        model_directory({f"expert.{number}": torch.full((2, 2), float(number)) for number in range(3)})
    )
    slices = {"expert.0": TensorSlice(source="expert.2"), "expert.1": None, "expert.2": None}
    checkpoint = ShardedCheckpoint(whole, slices)
    assert list(checkpoint.tensors) == ["expert.0"]
    assert torch.equal(checkpoint.read("expert.0"), torch.full((2, 2), 2.0))
    with pytest.raises(TensorMissing):
        checkpoint.stored("expert.1")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("matrix", TensorSlice(rows=(range(4, 8),))),
        ("matrix", TensorSlice(columns=range(4, 8))),
        ("vector", TensorSlice(rows=(range(4, 8),))),
        ("vector", TensorSlice(columns=range(0, 2))),
        ("scalar", TensorSlice(rows=(range(0, 1),))),
        ("stack", TensorSlice(columns=range(0, 2))),
    ],
)
def test_rejects_a_part_that_the_tensor_does_not_have(name: str, part: TensorSlice, model_directory: Directory) -> None:
    shapes = {"matrix": (6, 6), "vector": (6,), "scalar": (), "stack": (2, 2, 2)}
    whole = open_checkpoint(model_directory({each: torch.zeros(shape) for each, shape in shapes.items()}))
    with pytest.raises(TensorMissing, match="is it the model that its config describes"):
        ShardedCheckpoint(whole, {name: part})


@pytest.mark.parametrize("kind", [GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K])
def test_columns_of_a_quantised_matrix_are_whole_blocks(kind: GGMLType, tmp_path: Path, gguf_writer: Any) -> None:
    blocks = 4
    width = blocks * kind.block_elements
    data = torch.randint(0, 60, (3 * blocks * kind.block_bytes,), dtype=torch.uint8).numpy().tobytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(llama(gguf_writer()).add_tensor("blk.0.ffn_down.weight", (3, width), kind, data).build())
    stored = open_checkpoint(path).stored("model.layers.0.mlp.down_proj.weight")
    assert stored.shape == (3, width)
    columns = range(kind.block_elements, 3 * kind.block_elements)
    part = stored.with_columns(columns)
    assert torch.equal(decoded(part), decoded(stored)[:, columns.start : columns.stop])
    assert sum(num_bytes for _, num_bytes in part.spans(0, part.num_groups)) == part.num_bytes == stored.num_bytes // 2
    with pytest.raises(Unsupported, match=f"blocks of {kind.block_elements}"):
        stored.with_columns(range(0, width // 8))


def llama(writer: Any) -> Any:
    """The least that a GGUF of a Llama says about itself."""
    for key, value in {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 16,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": 8,
    }.items():
        writer.add(key, value)
    return writer.add_float("token_embd.weight", torch.ones(8, 8))
