"""Published integers on a GPU: columns that were quantised in another order add no error of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.kernels.quantised.matrix import OrderedMatrix

from .test_published_models import gptq

VOCAB, DRAWN_TOKENS = 512, 16
BATCHES = ((1, 300), (7, 40), (64, 7))
"""Requests and the tokens of each of their prompts."""


def write(path: Path, *, has_order: bool) -> Any:
    """A model in GPTQ. → the reference in float64, with the values that are in the files"""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **{"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024},
        tie_word_embeddings=False,
    )
    reference = transformers.Qwen3ForCausalLM(config).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.dim() == 1 else 0.06)
    reference.bfloat16().save_pretrained(path)
    tensors, dense = load_file(path / "model.safetensors"), dict(reference.double().named_parameters())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, values = gptq(tensors.pop(name).float(), has_order=has_order)
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
        dense[name].data.copy_(values)
    save_file(tensors, path / "model.safetensors")
    stored = json.loads((path / "config.json").read_text())
    described = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": has_order}
    (path / "config.json").write_text(json.dumps(stored | {"quantization_config": described}))
    return reference


def errors_of(path: Path, *, has_order: bool) -> list[torch.Tensor]:
    """The differences of all log-probabilities from those of the reference, for each of `BATCHES`."""
    reference = write(path, has_order=has_order)
    spec = LoadSpec(str(path), max_num_seqs=64, context_tokens=512, memory_bytes=2 << 30)
    engine = Engine.load(spec, torch.device("cuda", 0), lambda *_: None, lambda: False)
    matrices = {type(binding.matrix) for binding in engine.model.parameters.packed_bindings}
    assert (OrderedMatrix in matrices) == has_order
    while engine.prepare():
        pass
    found: list[torch.Tensor] = []
    for requests, length in BATCHES:
        generator = torch.Generator().manual_seed(requests)
        rows = {str(row): torch.randint(0, VOCAB, (length,), generator=generator).tolist() for row in range(requests)}
        logprobs: dict[str, list[float]] = {name: [] for name in rows}
        sampling = SamplingParams(temperature=0.0, top_logprobs=0)
        for name, prompt in rows.items():
            engine.submit(EngineRequest(name, tuple(prompt), DRAWN_TOKENS, sampling, prompt_logprobs=0))
        while engine.has_work:
            for output in engine.step():
                logprobs[output.request_id] += [each.logprob for each in (*output.prompt_logprobs, *output.logprobs)]
                rows[output.request_id] += output.tokens
        errors = []
        for name, tokens in rows.items():
            all_tokens = torch.tensor(tokens)
            exact = torch.log_softmax(reference(all_tokens[None]).logits[0, :-1], -1)
            errors.append(torch.tensor(logprobs[name]) - exact.gather(-1, all_tokens[1:, None])[:, 0])
        found.append(torch.cat(errors).abs())
    engine.close()
    return found


@pytest.mark.gpu
@torch.inference_mode()
def test_another_order_of_columns_adds_no_error(tmp_path: Path) -> None:
    (tmp_path / "ordered").mkdir()
    (tmp_path / "plain").mkdir()
    ordered = errors_of(tmp_path / "ordered", has_order=True)
    plain = errors_of(tmp_path / "plain", has_order=False)
    for batch, error, allowed in zip(BATCHES, ordered, plain, strict=True):
        summary = f"{batch}: {error.mean():.5f}, without an order {allowed.mean():.5f}"
        print(summary)
        assert error.mean() <= 1.25 * allowed.mean() + 1e-3, summary
