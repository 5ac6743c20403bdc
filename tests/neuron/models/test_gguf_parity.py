"""Every architecture from GGUF against the reference library on the decoded weights, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.neuron.models.driver import Driver, load
from tests.neuron.models.gguf_builds import BUILDS, VARIANTS, VOCAB, build, reference_of
from tests.neuron.models.gguf_models import MIXED, write_gguf

from cortex.neuron.layers.configs import Shard
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.weights.checkpoint import open_checkpoint
from cortex.neuron.weights.sharded import ShardedCheckpoint, TensorSlice

NUM_TOKENS = 40


def assert_same_logits(path: Path, reference: Any) -> None:
    tokens = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = reference(tokens[None]).logits[0]
    (logits,) = Driver(load(path), 1).logits([tokens], [[NUM_TOKENS - 1, 1]])
    assert (logits - expected).abs().max() < 1e-3 * expected.abs().max()
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(("architecture", "formats"), [("llama", ("F32",)), *((each, MIXED) for each in BUILDS)])
@torch.inference_mode()
def test_every_logit_matches_the_reference_library(architecture: str, formats: tuple[str, ...], tmp_path: Path) -> None:
    reference = reference_of(architecture)
    write_gguf(tmp_path / "m.gguf", architecture, reference, formats)
    assert_same_logits(tmp_path / "m.gguf", reference)


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_other_models_of_an_architecture_match(name: str, tmp_path: Path) -> None:
    architecture, parts = VARIANTS[name]
    reference = build(parts)
    write_gguf(tmp_path / "m.gguf", architecture, reference, ("Q8_0",))
    assert_same_logits(tmp_path / "m.gguf", reference)


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
@torch.inference_mode()
def test_tied_embeddings_match(architecture: str, tmp_path: Path) -> None:
    reference = reference_of(architecture, tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", architecture, reference, ("Q6_K",))
    assert_same_logits(tmp_path / "m.gguf", reference)


@torch.inference_mode()
def test_as_many_key_as_value_heads_match(tmp_path: Path) -> None:
    reference = reference_of("qwen35", linear_num_key_heads=6)
    write_gguf(tmp_path / "m.gguf", "qwen35", reference, ("Q8_0",))
    assert_same_logits(tmp_path / "m.gguf", reference)


@torch.inference_mode()
def test_joint_delta_inputs_and_joint_experts_match(tmp_path: Path) -> None:
    """Older files of Qwen3-Next have one tensor for all inputs; some files have one for the gate and up matrices."""

    def joint(source: str, tensor: torch.Tensor, layer: str) -> list[tuple[str, torch.Tensor]] | None:
        if "in_proj_qkvz" in source:
            return [(f"blk.{layer}.ssm_in.weight", tensor)]
        if "experts.gate_up_proj" in source:
            return [(f"blk.{layer}.ffn_gate_up_exps.weight", tensor)]
        return None

    reference = reference_of("qwen3next")
    write_gguf(tmp_path / "m.gguf", "qwen3next", reference, ("Q4_K", "Q8_0"), override=joint)
    assert_same_logits(tmp_path / "m.gguf", reference)


@torch.inference_mode()
def test_keys_and_values_of_latents_in_one_tensor_match(tmp_path: Path) -> None:
    """As in files of older converters."""
    reference = reference_of("deepseek2")

    def joint(source: str, tensor: torch.Tensor, layer: str) -> list[tuple[str, torch.Tensor]] | None:
        return [(f"blk.{layer}.attn_kv_b.weight", tensor)] if "kv_b_proj" in source else None

    write_gguf(tmp_path / "m.gguf", "deepseek2", reference, ("Q4_K", "Q8_0"), override=joint)
    assert_same_logits(tmp_path / "m.gguf", reference)


@torch.inference_mode()
def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    reference = reference_of("qwen35")
    extra = {"blk.2.nextn.eh_proj.weight": torch.ones(8, 8), "blk.2.attn_q.weight": torch.ones(8, 8)}
    write_gguf(tmp_path / "m.gguf", "qwen35", reference, ("Q8_0",), prediction_layers=1, extra=extra)
    assert_same_logits(tmp_path / "m.gguf", reference)


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3next", "qwen35moe", "glm4", "olmo2", "phi3", "deepseek2", "lfm2", "granitehybrid"]
)
def test_ranks_of_a_divided_model_read_their_part_of_every_tensor(architecture: str, tmp_path: Path) -> None:
    reference = reference_of(architecture)
    write_gguf(tmp_path / "m.gguf", architecture, reference, ("Q8_0", "F16"))
    whole = open_checkpoint(tmp_path / "m.gguf")
    for rank in range(2):
        slices = read_architecture(whole.config).tensor_slices(Shard(rank, 2))
        share = ShardedCheckpoint(open_checkpoint(tmp_path / "m.gguf"), slices)
        for name in share.tensors:
            part = slices.get(name) or TensorSlice()
            expected = whole.read(part.source or name)
            if part.rows:
                expected = torch.cat([expected[run.start : run.stop] for run in part.rows])
            if part.columns is not None:
                expected = expected[:, part.columns.start : part.columns.stop]
            assert torch.equal(share.read(name), expected), name
