from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.weights.errors import CheckpointError
from cortex.neuron.weights.gguf.checkpoint import rope_scaling
from cortex.neuron.weights.gguf.metadata import read_metadata

Writer = Callable[[], Any]


def llama3_divisors(head_dim: int, theta: float, factor: float, low: float, high: float, original: int) -> torch.Tensor:
    """The table that a converter writes, from the published definition of Llama 3 scaling."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors)


def scaling_of(tmp_path: Path, writer: Any, head_dim: int = 128, theta: float = 500_000.0) -> dict[str, Any] | None:
    path = tmp_path / "model.gguf"
    path.write_bytes(writer.build())
    return rope_scaling(read_metadata(path), "llama", theta, head_dim)


@pytest.mark.parametrize(("head_dim", "factor"), [(128, 8.0), (64, 32.0), (128, 32.0)])
def test_published_llama_tables_give_the_published_parameters(
    tmp_path: Path, gguf_writer: Writer, head_dim: int, factor: float
) -> None:
    table = llama3_divisors(head_dim, 500_000.0, factor, 1.0, 4.0, 8192)
    assert scaling_of(tmp_path, gguf_writer().add_float("rope_freqs.weight", table), head_dim) == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@given(
    head_dim=st.sampled_from([32, 64, 128]),
    factor=st.floats(1.5, 64),
    low=st.floats(0.5, 2),
    ratio=st.floats(3, 8),
    original=st.sampled_from([4096, 8192, 32768]),
)
def test_fitted_parameters_reproduce_any_llama3_table(
    tmp_path: Path, gguf_writer: Writer, head_dim: int, factor: float, low: float, ratio: float, original: int
) -> None:
    table = llama3_divisors(head_dim, 500_000.0, factor, low, low * ratio, original)
    if ((table > 1) & (table < table.max())).sum() < 2:
        return
    found = scaling_of(tmp_path, gguf_writer().add_float("rope_freqs.weight", table), head_dim)
    assert found is not None
    again = llama3_divisors(
        head_dim,
        500_000.0,
        found["factor"],
        found["low_freq_factor"],
        found["high_freq_factor"],
        found["original_max_position_embeddings"],
    )
    torch.testing.assert_close(again, table, rtol=2e-3, atol=0)


def test_table_of_ones_means_no_scaling(tmp_path: Path, gguf_writer: Writer) -> None:
    assert scaling_of(tmp_path, gguf_writer().add_float("rope_freqs.weight", torch.ones(64))) is None


@pytest.mark.parametrize(
    "table", [torch.linspace(1, 9, 64), torch.ones(63), torch.full((64,), math.nan), torch.zeros(64), -torch.ones(64)]
)
def test_rejects_a_table_that_is_not_llama3_scaling(tmp_path: Path, gguf_writer: Writer, table: torch.Tensor) -> None:
    with pytest.raises(CheckpointError):
        scaling_of(tmp_path, gguf_writer().add_float("rope_freqs.weight", table))


def test_yarn_and_linear_scaling_are_read_from_metadata(tmp_path: Path, gguf_writer: Writer) -> None:
    writer = gguf_writer().add("llama.rope.scaling.type", "yarn").add("llama.rope.scaling.factor", 4.0)
    writer.add("llama.rope.scaling.original_context_length", 32768)
    assert scaling_of(tmp_path, writer) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    writer = gguf_writer().add("llama.rope.scaling.type", "linear").add("llama.rope.scaling.factor", 2.0)
    assert scaling_of(tmp_path, writer) == {"rope_type": "linear", "factor": 2.0}
    assert scaling_of(tmp_path, gguf_writer().add("llama.rope.scaling.type", "none")) is None
    with pytest.raises(CheckpointError, match="longrope"):
        scaling_of(
            tmp_path,
            gguf_writer().add("llama.rope.scaling.type", "longrope").add("llama.rope.scaling.factor", 2.0),
        )
