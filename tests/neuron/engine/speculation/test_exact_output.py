"""Checking drafts changes how many steps a response takes, and nothing else: tokens, log-probabilities and the reason
of its end are those without drafts, for every option of a request and every kind of layer."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.loading.loading import build_model, load_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec
from cortex.neuron.layers.parameters import Parameters

from ...tiny_models import llama_config, llama_weights, tiny_delta, tiny_experts, tiny_sizes
from ..execution.replays import ReplayOnCpu
from .counting_models import CPU, VOCAB, AnyWidths, Response, counted, counting, responses, some_requests

DENSE: dict[str, Any] = {"model_type": "qwen3", **tiny_sizes(vocab_size=VOCAB, hidden_size=32)}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "windows": DENSE
    | {"sliding_window": 20, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    "mixture": DENSE | {"model_type": "qwen3_moe", **tiny_experts()},
    "hybrid": DENSE
    | {"model_type": "qwen3_5_text", **tiny_delta(linear_key_head_dim=8, linear_value_head_dim=8)}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "mamba": DENSE
    | {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "num_local_experts": 0}
    | {"shared_intermediate_size": 48, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    | {"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2},
    "short convolutions": DENSE | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
}
_EXPERTS = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_nextn_predict_layers": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
HEADS: dict[str, dict[str, Any]] = {
    "hybrid": FAMILIES["hybrid"],
    "hybrid mixture": FAMILIES["hybrid"] | {"model_type": "qwen3_next", **tiny_experts()},
    "attention": DENSE | {"model_type": "glm4_moe", **_EXPERTS},
    "latent attention": DENSE | {"model_type": "glm4_moe_lite", **_EXPERTS, **_LATENT},
}
"""Families whose models are published with a prediction head."""


def fill(parameters: Parameters) -> None:
    torch.manual_seed(1)
    for binding in parameters.bindings:
        torch.nn.init.normal_(binding.destination, std=0.5 if binding.destination.dim() == 1 else 0.15)


def make_engine(
    folder: Path,
    config: dict[str, Any],
    *,
    seed: int | None,
    late: bool = False,
    weights: Callable[[Parameters], None] = fill,
    **options: Any,
) -> Engine:
    """`seed`: of the widths; None: no drafts."""
    defaults: dict[str, Any] = {"dtype": "float32", "context_tokens": 128, "deterministic": True, "max_num_seqs": 4}
    spec = LoadSpec(str(folder), **(defaults | options))
    if seed is None:
        spec = replace(spec, speculation="off")
    rule = AnyWidths(random.Random(seed))
    return Engine(build_model(config, spec, CPU, weights), spec, overlaps=late, width_rule=lambda _: rule)


def with_predictions(requests: Sequence[EngineRequest], said: dict[str, Response], seed: int) -> list[EngineRequest]:
    """Predictions of the responses, with some changes."""
    draw = random.Random(seed)
    changed = []
    for request in requests:
        tokens = list(said[request.id][0])
        for _ in range(draw.randint(0, 3)):
            place = draw.randint(0, len(tokens))
            tokens[place : place + draw.randint(0, 2)] = [draw.randrange(256)] * draw.randint(0, 2)
        changed.append(replace(request, prediction=tuple(tokens)))
    return changed


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_are_those_without_drafts(folder: Path, family: str) -> None:
    seed = list(FAMILIES).index(family)
    requests = some_requests(seed)
    plain = make_engine(folder, FAMILIES[family], seed=None)
    expected = responses(plain, requests)
    plain.close()
    engine = make_engine(folder, FAMILIES[family], seed=seed, late=seed % 2 == 1)
    assert responses(engine, with_predictions(requests, expected, seed)) == expected
    assert responses(engine, requests) == expected  # drafts from the text alone, prompts from the cache
    stats = engine.stats()
    engine.close()
    assert set(stats.drafted_tokens) >= {"lookup", "prediction", *(("grammar",) if family == "dense" else ())}
    assert all(stats.accepted_tokens.values())
    assert stats.accepted_tokens["prediction"] < stats.drafted_tokens["prediction"], "no draft was wrong"
    assert stats.completion_tokens == 2 * sum(len(tokens) for tokens, _, _ in expected.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_responses_through_graphs_are_those_without_drafts(
    folder: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs in which each token is a row, as on a GPU."""
    monkeypatch.setattr("cortex.neuron.engine.execution.runner.default_capture", lambda *_, **__: ReplayOnCpu())
    requests = [replace(request, prompt=counted(request.prompt)) for request in some_requests(3)]
    requests = [replace(request, sampling=replace(request.sampling, top_logprobs=None)) for request in requests]
    options: dict[str, Any] = {"weights": counting, "deterministic": False}
    plain = make_engine(folder, FAMILIES[family], seed=None, **options)
    expected = responses(plain, requests)
    plain.close()
    engine = make_engine(folder, FAMILIES[family], seed=3, late=True, **options)
    while engine.prepare():
        pass
    predicted = with_predictions(requests, expected, 3)
    mixed = [request if number % 3 else replace(request, speculates=False) for number, request in enumerate(predicted)]
    assert responses(engine, mixed) == expected
    engine.close()


@pytest.mark.parametrize("family", HEADS)
def test_responses_with_a_prediction_head_are_those_without_drafts(folder: Path, family: str) -> None:
    seed = list(HEADS).index(family)
    requests = [replace(request, prompt=counted(request.prompt)) for request in some_requests(seed)]
    plain = make_engine(folder, HEADS[family], seed=None, weights=counting)
    expected = responses(plain, requests)
    plain.close()
    options: dict[str, Any] = {"speculation": "mtp", "weights": counting}
    engine = make_engine(folder, HEADS[family], seed=seed, late=seed % 2 == 1, **options)
    assert responses(engine, requests) == expected
    if seed % 2:
        engine.sleep()
        engine.wake(lambda *_: None)
    assert responses(engine, requests) == expected  # prompts from the cache, or after a sleep
    stats = engine.stats()
    engine.close()
    assert stats.accepted_tokens["mtp"] > 20
    assert stats.accepted_tokens["mtp"] < stats.drafted_tokens["mtp"], "no draft was wrong"


def save_llama(path: Path, folder: Path, noise: float, num_layers: int = 2) -> Path:
    """A model that counts, with the tokenizer in `folder`. `noise`: what is added to its weights."""
    config = llama_config(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=num_layers)
    shutil.copytree(folder, path)
    (path / "config.json").write_text(json.dumps(config))
    weights = llama_weights(config, std=0.08)
    embedding = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(1))
    weights["model.embed_tokens.weight"] = embedding
    weights["lm_head.weight"] = 0.4 * embedding.roll(1, dims=0)
    generator = torch.Generator().manual_seed(2)
    for name, tensor in weights.items():
        weights[name] = tensor + noise * torch.randn(tensor.shape, generator=generator)
    save_file(weights, path / "model.safetensors")
    return path


def test_responses_with_a_draft_model_are_those_without_drafts(folder: Path, tmp_path: Path) -> None:
    large, small = (save_llama(tmp_path / name, folder, noise) for name, noise in (("large", 0.0), ("small", 0.02)))
    requests = [replace(request, prompt=counted(request.prompt)) for request in some_requests(7)]
    options: dict[str, Any] = {"dtype": "float32", "context_tokens": 128, "deterministic": True, "max_num_seqs": 4}
    specs = [
        LoadSpec(str(large), speculation="off", **options),
        LoadSpec(str(large), speculation="draft", draft_path=str(small), **options),
    ]
    rule = AnyWidths(random.Random(7))
    plain, engine = (
        Engine(
            load_model(spec, CPU, lambda *_: None, lambda: False), spec, width_rule=lambda _: rule, moves_weights=True
        )
        for spec in specs
    )
    expected = responses(plain, requests)
    assert responses(engine, requests) == expected
    assert engine.info.weight_bytes == 2 * plain.info.weight_bytes
    assert engine.info.kv_bytes == 2 * plain.info.kv_bytes
    assert engine.sleep() > 2 * plain.info.weight_bytes - 1
    engine.wake(lambda *_: None)
    assert responses(engine, requests) == expected
    stats = engine.stats()
    for each in (plain, engine):
        each.close()
    assert 20 < stats.accepted_tokens["draft"] < stats.drafted_tokens["draft"]


def test_draft_models_with_another_tokenizer_are_rejected(folder: Path, tmp_path: Path) -> None:
    large, small = (save_llama(tmp_path / name, folder, 0.0) for name in ("large", "small"))
    tokenizer = json.loads((small / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (small / "tokenizer.json").write_text(json.dumps(tokenizer))
    spec = LoadSpec(str(large), speculation="draft", draft_path=str(small))
    with pytest.raises(LoadError, match="another tokenizer"):
        load_model(spec, CPU, lambda *_: None, lambda: False)
