"""Qwen3-Next and Qwen3.5 against the reference library, on tiny random checkpoints, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cortex.neuron.engine.loading.loading import LoadedModel, load_model
from cortex.neuron.engine.memory.plan import PAGE_TOKENS
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.kernels.batch import Batch, PrefillRow
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.families.qwen import Qwen3Next

from ..tiny_models import tiny_delta, tiny_sizes
from .reference_models import randomised

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    **tiny_sizes(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=5,
        num_attention_heads=6,
        max_position_embeddings=512,
        head_dim=16,
    ),
    **tiny_delta(linear_num_value_heads=6, linear_key_head_dim=12, linear_value_head_dim=10),
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
}


def qwen3_next(**changes: Any) -> transformers.PreTrainedModel:
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**(SIZES | EXPERTS | changes)))


def qwen3_5_text(**changes: Any) -> transformers.PreTrainedModel:
    return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**(SIZES | changes)))


def qwen3_5_moe_text(**changes: Any) -> transformers.PreTrainedModel:
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**(SIZES | EXPERTS | changes)))


def qwen3_5(**changes: Any) -> transformers.PreTrainedModel:
    config = transformers.Qwen3_5Config(text_config=SIZES | changes, vision_config=VISION)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def qwen3_5_moe(**changes: Any) -> transformers.PreTrainedModel:
    config = transformers.Qwen3_5MoeConfig(text_config=SIZES | EXPERTS | changes, vision_config=VISION)
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


CHECKPOINTS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "next": qwen3_next,
    "next, one dense layer": lambda: qwen3_next(mlp_only_layers=[1]),
    "next, as many key as value heads": lambda: qwen3_next(linear_num_key_heads=6, linear_conv_kernel_dim=2),
    "next, layers by interval": lambda: qwen3_next(layer_types=None, num_hidden_layers=4),
    "next, tied": lambda: qwen3_next(tie_word_embeddings=True, attention_bias=True),
    "3.5 text": qwen3_5_text,
    "3.5 text, experts": qwen3_5_moe_text,
    "3.5 multimodal": qwen3_5,
    "3.5 multimodal, experts": qwen3_5_moe,
}


def reference_of(build: Callable[[], transformers.PreTrainedModel]) -> Any:
    return randomised(build, std=0.12, vector_std=0.3)


def load(reference: transformers.PreTrainedModel, path: Path, **saving: Any) -> LoadedModel:
    reference.save_pretrained(path, **saving)
    return load_model(LoadSpec(str(path), dtype="float32", max_num_seqs=3), CPU, lambda *_: None, lambda: False)


def logits_of(loaded: LoadedModel, tokens: torch.Tensor, cuts: list[int], row: int = 0) -> torch.Tensor:
    """The logits of every position, computed in steps of `cuts` tokens each, then one by one."""
    model, pages = loaded.model, torch.arange(1, 17, dtype=torch.int32)
    table = torch.zeros(4, 16, dtype=torch.int32)
    table[row] = pages
    start, logits = 0, []
    for count in [*cuts, *[1] * (len(tokens) - sum(cuts))]:
        positions = torch.arange(start, start + count)
        batch = Batch(
            tokens=tokens[start : start + count],
            positions=positions,
            slots=pages[positions // PAGE_TOKENS].long() * PAGE_TOKENS + positions % PAGE_TOKENS,
            rows=torch.tensor([row]),
            lengths=torch.tensor([start + count], dtype=torch.int32),
            page_table=table,
            num_decodes=int(count == 1),
            max_length=start + count,
            prefills=() if count == 1 else (PrefillRow(row, start, count, 0),),
        )
        logits.append(model.logits(model(batch)))
        start += count
    return torch.cat(logits)


@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.inference_mode()
def test_every_logit_matches_the_reference_library(name: str, tmp_path: Path) -> None:
    reference = reference_of(CHECKPOINTS[name])
    loaded = load(reference, tmp_path)
    tokens = torch.randint(0, 96, (150,))
    expected = reference(tokens[None]).logits[0]
    for cuts in ([150], [1, 2, 70, 74], [33, 114]):
        logits = logits_of(loaded, tokens, cuts, row=len(cuts) - 1)
        assert (logits - expected).abs().max() < 1e-3
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("next", torch.float16),
        ("next, tied", torch.bfloat16),
        ("3.5 text", torch.float16),
        ("3.5 multimodal, experts", torch.bfloat16),
    ],
)
@torch.inference_mode()
def test_sharded_files_in_half_precision_match(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    halved = reference_of(CHECKPOINTS[name])
    halved = halved.to(dtype)
    loaded = load(halved, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    reference = type(halved).from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 96, (70,))
    expected = reference(tokens[None]).logits[0]
    logits = logits_of(loaded, tokens, [64])
    assert (logits - expected).abs().max() < 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_a_tower_that_is_left_out_is_noted_and_takes_no_memory(tmp_path: Path) -> None:
    loaded = load(reference_of(qwen3_5), tmp_path)
    assert loaded.notes == ()
    assert loaded.model.tower is not None
    spec = LoadSpec(str(tmp_path), dtype="float32", max_num_seqs=3, vision="off")
    without = load_model(spec, CPU, lambda *_: None, lambda: False)
    assert without.notes == ("text only: the vision tower is not loaded",)
    assert without.model.tower is None
    assert without.weight_bytes + loaded.model.tower.parameters.num_bytes == loaded.weight_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention", "mamba"]}, "layer_types"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"linear_key_head_dim": None}, "linear_key_head_dim"),
    ],
)
def test_rejects_an_invalid_config_by_option(change: dict[str, Any], message: str) -> None:
    config = {"model_type": "qwen3_next", **SIZES, **EXPERTS, "num_hidden_layers": 2, "layer_types": None, **change}
    config = {name: value for name, value in config.items() if value is not None}
    with pytest.raises(UnsupportedModel, match=message):
        Qwen3Next(config)
