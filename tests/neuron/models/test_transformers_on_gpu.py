"""Models of the `transformers` library on a GPU in bfloat16: prompts and decode steps, captured where they can be, are
as near to the library in float32 as the library's own bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import LoadSpec

from .reference_models import randomised
from .test_families_on_gpu import DRAWN_TOKENS, PROMPT_TOKENS, SIZES, VOCAB, engine_logprobs, logprobs
from .transformers_models import TABLE

CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 90, "attn_logit_softcapping": 5.0, "num_hidden_layers": 4},
    "gpt_neox": {"num_attention_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "mixtral": {"num_local_experts": 8},
    "phi": {},
    "starcoder2": {"sliding_window": None},
}


@pytest.mark.gpu
@pytest.mark.parametrize("quant", [None, "q8_0"])
@pytest.mark.parametrize("family", CHANGES)
@torch.inference_mode()
def test_error_is_near_that_of_the_library(family: str, quant: str | None, tmp_path: Path) -> None:
    device, entry = torch.device("cuda", 0), TABLE[family]
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "eos_token_id": None}
    config = entry.config(**{**SIZES, **sizes, **CHANGES[family]}, attn_implementation="eager")
    reference = randomised(lambda: entry.model(config), std=0.06, vector_std=0.5)
    reference.save_pretrained(tmp_path)
    spec = LoadSpec(str(tmp_path), quant=quant, max_num_seqs=4, context_tokens=512, memory_bytes=2 << 30)
    engine = Engine.load(spec, device, lambda *_: None, lambda: False)
    while engine.prepare():
        pass
    prompt = tuple(torch.randint(0, VOCAB, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist())
    drawn, ours = engine_logprobs(engine, prompt)
    again, _ = engine_logprobs(engine, prompt)  # from the prefix cache
    engine.close()
    tokens = torch.tensor([*prompt, *drawn])
    exact = logprobs(reference, tokens)
    theirs = logprobs(reference.to(device, torch.bfloat16), tokens.to(device))
    error, allowed = ((each - exact).abs().mean() for each in (ours, theirs))
    print(family, quant, f"{error:.4f}, theirs {allowed:.4f}")
    assert len(drawn) == len(again) == DRAWN_TOKENS
    assert error <= (1.5 if quant is None else 3.0) * allowed + 1e-3
