"""Qwen3-MoE against the reference library, on tiny random checkpoints, in float32 on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.memory.plan import PAGE_TOKENS
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.kernels.batch import Batch, PrefillRow
from cortex.neuron.layers.configs import MoEConfig
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.families.qwen import Qwen3Moe

from ..tiny_models import tiny_sizes
from .reference_models import randomised

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    **tiny_sizes(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        max_position_embeddings=512,
        head_dim=16,
    ),
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "renormalised": {"norm_topk_prob": True},
    "many experts": {"num_experts": 33, "num_experts_per_tok": 7, "norm_topk_prob": True},
    "every expert": {"num_experts": 4, "num_experts_per_tok": 4},
    "one of two": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 20},
    "dense layers between": {"mlp_only_layers": [0, 2], "norm_topk_prob": True},
    "every second layer": {"decoder_sparse_step": 2, "num_hidden_layers": 4},
    "tied, biased": {"tie_word_embeddings": True, "attention_bias": True},
    "no experts": {"num_experts": 0},
    "windows": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
}


def reference_of(**changes: Any) -> Any:
    config = transformers.Qwen3MoeConfig(**(SIZES | changes | {"attn_implementation": "eager"}))
    return randomised(lambda: transformers.Qwen3MoeForCausalLM(config), std=0.15, vector_std=0.5)


def spec(path: Path) -> LoadSpec:
    return LoadSpec(str(path), dtype="float32", context_tokens=256, max_num_seqs=4, prefill_chunk_tokens=48)


def logits_of(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of every position, as one prefill."""
    count = len(tokens)
    batch = Batch(
        tokens=tokens,
        positions=torch.arange(count),
        slots=torch.arange(count) + PAGE_TOKENS,
        rows=torch.tensor([0]),
        lengths=torch.tensor([count], dtype=torch.int32),
        page_table=torch.arange(1, 9, dtype=torch.int32)[None],
        num_decodes=0,
        max_length=count,
        prefills=(PrefillRow(0, 0, count, 0),),
    )
    return model.logits(model(batch))


def greedily(path: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The engine's response to all prompts together."""
    engine = Engine.load(spec(path), CPU, lambda *_: None, lambda: False)
    said: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        said[str(number)] = []
        engine.submit(EngineRequest(str(number), tuple(prompt), max_tokens, SamplingParams(temperature=0.0)))
    while engine.has_work:
        for output in engine.step():
            said[output.request_id].extend(output.tokens)
    engine.check_integrity()
    return list(said.values())


def continued(reference: Any, prompt: list[int], max_tokens: int) -> list[int]:
    ids = reference.generate(
        torch.tensor([prompt]), max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False
    )
    continuation: list[int] = ids[0, len(prompt) :].tolist()
    return continuation


@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.inference_mode()
def test_every_logit_matches_the_reference_library(name: str, tmp_path: Path) -> None:
    reference = reference_of(**CHECKPOINTS[name])
    reference.save_pretrained(tmp_path)
    loaded = load_model(spec(tmp_path), CPU, lambda *_: None, lambda: False)
    tokens = torch.randint(0, 96, (130,))
    expected = reference(tokens[None]).logits[0]
    logits = logits_of(loaded.model, tokens)
    assert (logits - expected).abs().max() < 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["renormalised", "tied, biased"])
@torch.inference_mode()
def test_sharded_files_in_half_precision_match(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference_of(**CHECKPOINTS[name]).to(dtype).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    reference = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 96, (60,))
    expected = reference(tokens[None]).logits[0]
    logits = logits_of(load_model(spec(tmp_path), CPU, lambda *_: None, lambda: False).model, tokens)
    assert (logits - expected).abs().max() < 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", ["plain", "many experts", "dense layers between"])
@torch.inference_mode()
def test_engine_matches_generate_of_the_reference_library(name: str, tmp_path: Path) -> None:
    """Chunked prefill, prefill together with decode, and decode alone: whatever else is in the batch."""
    reference = reference_of(**CHECKPOINTS[name])
    reference.save_pretrained(tmp_path)
    prompts = [torch.randint(0, 96, (length,)).tolist() for length in (1, 5, 100, 33)]
    expected = [continued(reference, prompt, 12) for prompt in prompts]
    assert greedily(tmp_path, prompts, 12) == expected


@torch.inference_mode()
def test_stacked_experts_and_published_spelling_load_the_same(tmp_path: Path) -> None:
    reference = reference_of(norm_topk_prob=True)
    apart, together = tmp_path / "apart", tmp_path / "together"
    reference.save_pretrained(apart)
    reference.save_pretrained(together, save_original_format=False)
    config = json.loads((together / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    (together / "config.json").write_text(json.dumps(config))
    tokens = torch.randint(0, 96, (40,))
    first, second = (load_model(spec(path), CPU, lambda *_: None, lambda: False).model for path in (apart, together))
    assert torch.equal(logits_of(first, tokens), logits_of(second, tokens))


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [True, True, True, True]),
        ({"mlp_only_layers": [0, 3]}, [False, True, True, False]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"mlp_only_layers": None, "decoder_sparse_step": 3}, [False, False, True, False]),
    ],
)
def test_config_selects_the_layers_with_experts(changes: dict[str, Any], sparse: list[bool]) -> None:
    config = SIZES | {"num_hidden_layers": 4} | changes
    blocks = [layer.feed_forward for layer in Qwen3Moe(config).layers]
    assert [isinstance(block, MoEConfig) for block in blocks] == sparse


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_experts_per_tok": 9}, "9 of 8 experts"), ({"moe_intermediate_size": None}, "moe_intermediate_size")],
)
def test_rejects_an_invalid_config_by_option(changes: dict[str, Any], message: str) -> None:
    config = {name: value for name, value in (SIZES | changes).items() if value is not None}
    with pytest.raises(UnsupportedModel, match=message):
        Qwen3Moe(config)
