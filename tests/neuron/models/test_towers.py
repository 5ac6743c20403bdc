"""Pictures through tower and decoder, against the reference library, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import LoadSpec, StepOutput
from cortex.neuron.models.sizes import WeightStorage, weight_bytes
from cortex.neuron.models.towers.tower import PixelGrid

from ..engine_runs import run, tokens_of
from .vision_models import (
    VISION_FAMILIES,
    Prompt,
    library_inputs,
    random_image,
    spec_of,
    text,
    write_vision_model,
)

CPU = torch.device("cpu")


def engine_of(folder: Path, **changes: Any) -> Engine:
    options: dict[str, Any] = {"dtype": "float32", "context_tokens": 512, "max_num_seqs": 4}
    return Engine.load(LoadSpec(str(folder), **(options | changes)), CPU, lambda *_: None, lambda: False)


def drawn(outputs: list[StepOutput]) -> list[int]:
    assert outputs[-1].finish == "length", outputs[-1]
    return tokens_of(outputs)


def prompts_of(folder: Path) -> list[Prompt]:
    """Odd sizes, several pictures, one at the beginning, one token between two, and text only."""
    spec = spec_of(folder)
    odd, wide, small = random_image(37, 61, 1), random_image(120, 17, 2), random_image(9, 8, 3)
    return [
        Prompt.of(spec, [text(7, 0), odd, text(30, 1), wide, text(5, 2)]),
        Prompt.of(spec, [small, text(1, 5), odd, text(3, 3)]),
        Prompt.of(spec, [text(40, 4)]),
    ]


@pytest.mark.parametrize("family", VISION_FAMILIES)
@torch.inference_mode()
def test_pictures_match_the_reference_library(family: str, tmp_path: Path) -> None:
    """Vectors of the tower, log-probabilities of whole prompts, and responses: in chunks that divide pictures and
    pages, in a batch, and again from the prefix cache."""
    reference = write_vision_model(family, tmp_path)
    spec, prompts = spec_of(tmp_path), prompts_of(tmp_path)
    engine = engine_of(tmp_path, prefill_chunk_tokens=20)
    tower = engine.model.tower
    assert tower is not None
    computed = weight_bytes(engine.model.architecture, WeightStorage(4))
    assert computed + engine.model.ropes.num_bytes == engine.info.weight_bytes
    for prompt in prompts[:2]:
        inputs = library_inputs(spec, prompt, family)
        grids = {name: inputs[name] for name in inputs.keys() & {"image_grid_thw", "image_sizes", "image_position_ids"}}
        features = reference.model.get_image_features(inputs["pixel_values"], **grids, return_dict=True).pooler_output
        expected = torch.cat(list(features)) if isinstance(features, (list, tuple)) else features
        found = tower([PixelGrid(picture.grid, picture.pixels) for picture in prompt.pictures])
        assert (found[:, 0] - expected.flatten(0, -2)).abs().max() < 1e-3 * expected.abs().max(), family
    for number, prompt in enumerate(prompts):
        logits = reference(**library_inputs(spec, prompt, family)).logits[0].log_softmax(-1)
        [output, *_] = run(engine, prompt.request("scores", 1, prompt_logprobs=0))["scores"]
        expected = logits[:-1].gather(1, torch.tensor(prompt.tokens[1:])[:, None])[:, 0]
        scores = torch.tensor([each.logprob for each in output.prompt_logprobs])
        assert (scores - expected).abs().max() < 1e-3, number
    expected_tokens = [
        reference.generate(**library_inputs(spec, prompt, family), max_new_tokens=8, do_sample=False)[0][
            len(prompt.tokens) :
        ]
        for prompt in prompts
    ]
    engine.close()
    engine = engine_of(tmp_path, prefill_chunk_tokens=20)
    for turn in range(2):
        outputs = run(engine, *(prompt.request(str(number)) for number, prompt in enumerate(prompts)))
        for number, expected in enumerate(expected_tokens):
            assert drawn(outputs[str(number)]) == expected.tolist(), (turn, number)
            if turn:
                assert (outputs[str(number)][0].cached_tokens or 0) >= len(prompts[number].tokens) // 32 * 32 - 32
    engine.close()
