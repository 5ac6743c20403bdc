"""Checkpoints in the form in which they are published, which the reference library does not write today."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from .driver import PROMPT_TOKENS, Driver, assert_parity, load, some_tokens
from .family_models import reference_of
from .transformers_models import reference_of as library_reference_of


@pytest.mark.parametrize(
    ("family", "name", "stated"),
    [
        ("mistral3", "mistral", {}),  # Mistral Small 3.2
        ("mistral3", "ministral", {}),  # Ministral 3 8B
        ("mistral3", "ministral", {"tie_word_embeddings": True}),
        ("lfm2", "wide", {"tie_embedding": True}),
        ("arcee", "plain", {"tie_word_embeddings": True}),
    ],
)
@torch.inference_mode()
def test_output_matrix_in_the_files_is_used_whatever_the_config_says(
    family: str, name: str, stated: dict[str, Any], tmp_path: Path
) -> None:
    reference = (library_reference_of if family == "arcee" else reference_of)(family, name)
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {})):
        part.pop("tie_word_embeddings", None)
    path.write_text(json.dumps(config | stated))
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(logits, reference(tokens[None]).logits[0])


@torch.inference_mode()
def test_experts_in_one_float8_tensor_give_the_logits_of_their_values(tmp_path: Path) -> None:
    reference = reference_of("glm4_moe", "plain")
    stacked: dict[str, torch.Tensor] = {}
    for name, parameter in reference.named_parameters():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            scale = torch.exp2((parameter.abs().amax((1, 2), keepdim=True) / 448).log2().ceil())
            codes = (parameter / scale).to(torch.float8_e4m3fn)
            stacked |= {name: codes, f"{name}_scale_inv": scale}
            parameter.copy_(codes.float() * scale)
    assert stacked
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    save_file(rest | stacked, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(logits, reference(tokens[None]).logits[0])
