"""Divided models against whole ones: the same logits, for every family, on two and on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers

from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.request import LoadSpec, RankSpec

from ...models.driver import CPU, Driver, some_tokens
from ...models.family_models import TABLE, reference_of
from ...models.reference_models import randomised
from ...tiny_models import tiny_delta, tiny_experts, tiny_sizes

SIZES: dict[str, Any] = tiny_sizes(
    vocab_size=97,  # odd: the ranks have different shares
    hidden_size=48,
    intermediate_size=80,
    num_attention_heads=8,
    num_key_value_heads=2,  # four ranks share them
    head_dim=16,
)
EXPERTS: dict[str, Any] = tiny_experts(num_experts_per_tok=3)
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 40}
DELTA: dict[str, Any] = {
    **tiny_delta(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=12, linear_value_head_dim=10),
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
BIASES = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}


def build(model: str, config: str, **sizes: Any) -> Any:
    configured = getattr(transformers, config)(**(SIZES | sizes))
    return randomised(lambda: getattr(transformers, model)(configured), std=0.12, vector_std=0.3)


FAMILIES = {
    "llama": lambda: build("LlamaForCausalLM", "LlamaConfig", **BIASES),
    "qwen3": lambda: build("Qwen3ForCausalLM", "Qwen3Config", **TIED),
    "qwen3_moe": lambda: build("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **EXPERTS),
    "qwen3_next": lambda: build("Qwen3NextForCausalLM", "Qwen3NextConfig", **EXPERTS, **SHARED, **DELTA),
    "qwen3_5": lambda: build("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", **DELTA),
    "qwen3_5_moe": lambda: build("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", **EXPERTS, **SHARED, **DELTA),
}


@torch.inference_mode()
def logits_of(
    path: Path,
    rank: RankSpec | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    on_read: Callable[[int], None] = lambda _: None,
) -> torch.Tensor:
    """A prompt in two chunks, then two single tokens: the logits of every position. `on_read`: gets how many bytes the
    load reads."""
    spec = LoadSpec(str(path), dtype=dtype, max_num_seqs=2, rank=rank)
    group = None if rank is None else TorchGroup.join(rank, CPU, lambda: None)
    model = load_model(spec, CPU, lambda _stage, _done, total: on_read(total), lambda: False, group).model
    (logits,) = Driver(model, 1).logits([some_tokens(40, seed=1)], [[33, 5, 1, 1]])
    if group is not None:
        group.close()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_divided_model_equal_those_of_one_device(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    FAMILIES[family]().save_pretrained(path)
    expected = logits_of(path)
    for size in (2, 4):
        directory = tmp_path / f"group of {size}"
        directory.mkdir()
        ranks = [RankSpec(rank, size, str(directory)) for rank in range(size)]
        read_bytes: list[int] = []
        with ThreadPoolExecutor(size) as pool:
            results = list(pool.map(partial(logits_of, path, on_read=read_bytes.append), ranks))
        for logits in results:
            assert (logits - expected).abs().max() < 1e-4
        # Its own part and little more: norms, and of six experts on four ranks one or two.
        assert 0 < max(read_bytes) < {2: 0.52, 4: 0.35}[size] * (path / "model.safetensors").stat().st_size


@pytest.mark.parametrize("family", TABLE)
def test_logits_of_two_ranks_equal_those_of_one_device(family: str, tmp_path: Path) -> None:
    """The families that are options of Llama's shape, each with the most of them."""
    path, directory = tmp_path / "model", tmp_path / "group"
    reference_of(family, list(TABLE[family].changes)[-1]).save_pretrained(path)
    expected = logits_of(path)
    directory.mkdir()
    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(partial(logits_of, path), [RankSpec(rank, 2, str(directory)) for rank in range(2)]):
            assert (logits - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)


def test_ranks_agree_on_recomputed_near_ties_in_half_precision(tmp_path: Path) -> None:
    """A CPU recomputes the highest logits in float32; each rank has the rows of some tokens only."""
    path = tmp_path / "model"
    FAMILIES["qwen3"]().save_pretrained(path)
    exact = logits_of(path)
    (tmp_path / "group").mkdir()
    ranks = [RankSpec(rank, 2, str(tmp_path / "group")) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: logits_of(path, rank, dtype="bfloat16"), ranks)
    assert torch.equal(first, second)
    assert first.dtype == torch.float32
    assert (first - exact).abs().max() < 0.05 * exact.abs().max()
