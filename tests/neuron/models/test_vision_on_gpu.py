"""Pictures on a GPU in bfloat16: as near to the reference library in float32 as the library's own bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import LoadSpec

from ..engine_runs import run
from .test_towers import drawn, prompts_of
from .vision_models import VISION_FAMILIES, Prompt, library_inputs, spec_of, write_vision_model


def scores(model: Any, inputs: dict[str, Any], prompt: Prompt) -> torch.Tensor:
    """The log-probabilities of each token of the prompt but the first."""
    device, dtype = model.device, model.dtype
    placed = {name: value.to(device) for name, value in inputs.items()}
    placed = {name: value.to(dtype) if value.is_floating_point() else value for name, value in placed.items()}
    logits = model(**placed).logits[0, :-1].float().log_softmax(-1).cpu()
    chosen: torch.Tensor = logits.gather(1, torch.tensor(prompt.tokens[1:])[:, None])[:, 0]
    return chosen


@pytest.mark.gpu
@pytest.mark.parametrize("family", VISION_FAMILIES)
@torch.inference_mode()
def test_error_of_pictures_is_at_most_that_of_the_reference_library(family: str, tmp_path: Path) -> None:
    reference = write_vision_model(family, tmp_path)
    spec, prompts = spec_of(tmp_path), prompts_of(tmp_path)
    device = torch.device("cuda", 0)
    options = LoadSpec(str(tmp_path), max_num_seqs=4, context_tokens=512, memory_bytes=4 << 30)
    engine = Engine.load(options, device, lambda *_: None, lambda: False)
    while engine.prepare():
        pass
    inputs = [library_inputs(spec, prompt, family) for prompt in prompts]
    exact = [scores(reference, each, prompt) for each, prompt in zip(inputs, prompts, strict=True)]
    half = reference.to(device, torch.bfloat16)
    theirs = [scores(half, each, prompt) for each, prompt in zip(inputs, prompts, strict=True)]
    for number, prompt in enumerate(prompts):
        [output, *_] = run(engine, prompt.request("scored", 1, prompt_logprobs=0))["scored"]
        ours = torch.tensor([each.logprob for each in output.prompt_logprobs])
        error, allowed = (ours - exact[number]).abs(), (theirs[number] - exact[number]).abs()
        summary = f"{family} {number}: {error.mean():.4f}, theirs {allowed.mean():.4f}"
        print(summary)
        assert error.mean() <= 1.3 * allowed.mean() + 2e-3, summary
    # Decode steps are captured; the second turn comes from the prefix cache.
    first = run(engine, *(prompt.request(str(number)) for number, prompt in enumerate(prompts)))
    again = run(engine, *(prompt.request(str(number)) for number, prompt in enumerate(prompts)))
    for number in range(len(prompts)):
        assert len(drawn(first[str(number)])) == len(drawn(again[str(number)])) == 8
    engine.close()
