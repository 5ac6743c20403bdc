"""Every family that is a few options of Llama's shape, against the reference library, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import EngineRequest, SamplingParams

from .family_models import CASES, reference_of
from .test_parity import PROMPT_TOKENS, Driver, assert_parity, load, spec
from .tiny_family import VOCAB


@pytest.mark.parametrize(("family", "name"), CASES)
@torch.inference_mode()
def test_every_logit_matches_the_reference_library(family: str, name: str, tmp_path: Path) -> None:
    """For a prompt that is computed whole, in chunks that do not fit pages, token by token, and with another one."""
    reference = reference_of(family, name)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    generator = torch.Generator().manual_seed(0)
    tokens, other = (torch.randint(0, VOCAB, (count,), generator=generator) for count in (PROMPT_TOKENS, 40))
    expected = reference(tokens[None]).logits[0]
    (whole,) = Driver(model, 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(whole, expected)
    cut, second = Driver(model, 2).logits([tokens, other], [[31, 1, 2, 30, 1, 1, 1, 8], [1, 38, 1]])
    assert_parity(cut, expected)
    assert_parity(second, reference(other[None]).logits[0])
    assert (whole - expected).abs().max() < 1e-4 * expected.abs().max()


GENERATED = [
    ("gemma3_text", "capped"),
    ("gemma4_text", "all of it"),
    ("cohere2", "plain"),
    ("glm4_moe", "plain"),
    ("gpt_oss", "windows"),
    ("glm4_moe_lite", "plain"),
    ("lfm2", "plain"),
    ("granitemoehybrid", "mixture"),
    ("nemotron_h", "mixture"),
]


@pytest.mark.parametrize(("family", "name"), GENERATED)
@torch.inference_mode()
def test_engine_matches_generate_of_the_reference_library(family: str, name: str, tmp_path: Path) -> None:
    """Prompts longer than a chunk, prefilled together with rows that decode, and again from the prefix cache."""
    reference = reference_of(family, name)
    reference.save_pretrained(tmp_path)
    engine = Engine.load(spec(tmp_path, prefill_chunk_tokens=20), torch.device("cpu"), lambda *_: None, lambda: False)
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(0, VOCAB, (count,), generator=generator).tolist()) for count in (5, 90, 90)]
    expected = [
        reference.generate(torch.tensor([prompt]), max_new_tokens=10, min_new_tokens=10, do_sample=False)[0]
        for prompt in prompts
    ]
    for _ in range(2):
        said: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
        for number, prompt in enumerate(prompts):
            engine.submit(EngineRequest(str(number), prompt, 10, SamplingParams(temperature=0.0)))
        while engine.has_work:
            for output in engine.step():
                said[output.request_id].extend(output.tokens)
        for tokens, prompt, ids in zip(said.values(), prompts, expected, strict=True):
            assert tokens == ids[len(prompt) :].tolist()
    engine.close()
