"""Vision towers of GGUF models: a file next to the model's, written the way that published ones are converted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.text.files import picture_spec
from cortex.neuron.weights.gguf.towers import best_projector

from ..engine_runs import run
from .gguf_builds import WINDOWS
from .gguf_models import write_gguf
from .gguf_towers import write_projector
from .vision_models import (
    QWEN35,
    QWEN_TOKENS,
    QWEN_TOWER,
    VISION_FAMILIES,
    Prompt,
    gemma3,
    library_inputs,
    random_image,
    random_reference,
    text,
)

CPU = torch.device("cpu")


def _qwen35() -> Any:
    """With every second layer an attention layer, which rotates a quarter of each head."""
    rope = QWEN35["rope_parameters"] | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    layers = ["linear_attention", "full_attention"] * 2
    text_config = QWEN35 | {"num_hidden_layers": 4, "layer_types": layers, "rope_parameters": rope}
    config = transformers.Qwen3_5Config(text_config=text_config, vision_config=QWEN_TOWER, **QWEN_TOKENS)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _gemma3() -> Any:
    """With an order of layers that files can have."""
    return gemma3(WINDOWS)


@dataclass(frozen=True, slots=True)
class Row:
    """What is particular about the files of one family."""

    architecture: str
    build: Callable[[], Any] | None = None
    """None: as in `vision_models.py`."""
    spec: dict[str, Any] = field(default_factory=dict)
    """What the file says about pictures."""
    swaps_feed_forward: bool = False


STD = {"std": (0.25, 0.5, 0.5)}
ROWS = {
    "qwen3_5": Row("qwen35", _qwen35, STD | {"patch": 4, "merge": 2, "least": 256, "most": 4096}),
    "qwen3_vl": Row("qwen3vl", None, STD | {"patch": 4, "merge": 2}),
    "gemma3": Row("gemma3", _gemma3, STD | {"sizing": "square", "patch": 4, "merge": 2, "most": 32}),
    "gemma3, early": Row("gemma3", _gemma3, STD, swaps_feed_forward=True),
    "gemma4": Row("gemma4", None, {"sizing": "budget", "patch": 4, "merge": 3, "most": 280}),
    "gemma4, whole": Row("gemma4", None, {"std": (1.0, 1.0, 1.0)}),
    "gemma4_unified": Row("gemma4", None, {"sizing": "budget", "patch": 4, "merge": 3}),
    "mistral3": Row("mistral3", None, STD | {"sizing": "edge", "patch": 4, "merge": 2, "most": 64}),
    "mistral3, as Llama": Row("llama", None, STD),
}
MAX_SOFT_TOKENS = 20
"""Gemma 4's files do not say it, and the default is too many for a tiny model."""


@pytest.mark.parametrize("name", ROWS)
@torch.inference_mode()
def test_pictures_match_the_reference_library(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    family = name if name in VISION_FAMILIES else name.partition(",")[0]
    reference = random_reference(family, row.build)
    reference.config.text_config.tie_word_embeddings = reference.config.tie_word_embeddings
    model = tmp_path / "model-F32.gguf"
    write_gguf(model, row.architecture, reference)
    projector = tmp_path / "mmproj-model-f32.gguf"
    write_projector(projector, reference, family, swaps_feed_forward=row.swaps_feed_forward)
    spec = picture_spec(model)
    assert spec is not None
    assert spec == picture_spec(tmp_path)
    assert {option: getattr(spec, option) for option in row.spec} == row.spec
    if spec.sizing == "budget":
        spec = replace(spec, most=MAX_SOFT_TOKENS)
    load = LoadSpec(str(model), dtype="float32", context_tokens=512, max_num_seqs=2, prefill_chunk_tokens=20)
    engine = Engine.load(load, CPU, lambda *_: None, lambda: False)
    assert engine.model.tower is not None
    prompt = Prompt.of(spec, [text(7, 0), random_image(37, 61, 1), text(30, 1), random_image(20, 90, 2), text(5, 2)])
    logits = reference(**library_inputs(spec, prompt, family)).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, torch.tensor(prompt.tokens[1:])[:, None])[:, 0]
    [output, *_] = run(engine, prompt.request("scores", 1, prompt_logprobs=0))["scores"]
    assert (torch.tensor([each.logprob for each in output.prompt_logprobs]) - expected).abs().max() < 1e-3
    engine.close()


def test_a_file_of_another_model_beside_it_is_not_its_tower(tmp_path: Path) -> None:
    reference = random_reference("qwen3_5", _qwen35)
    model = tmp_path / "model.gguf"
    write_gguf(model, "qwen35", reference)
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_string("clip.projector_type", "another")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert picture_spec(model) is None
    load = LoadSpec(str(model), dtype="float32", context_tokens=64, max_num_seqs=2)
    engine = Engine.load(load, CPU, lambda *_: None, lambda: False)
    assert engine.model.tower is None
    engine.close()


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["a.gguf", "mmproj-Q8_0.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf", "README.md"], "mmproj-BF16.gguf"),
        (["mmproj-F32.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        (["mmproj-gemma-3-4b-it-bf16.gguf", "mmproj-Qwen3.5-9B-Q8_0.gguf"], "mmproj-Qwen3.5-9B-Q8_0.gguf"),
        (["Qwen3.5-9B-mmproj-f16.gguf", "Qwen3.5-4B-mmproj-bf16.gguf"], "Qwen3.5-9B-mmproj-f16.gguf"),
        (["a.gguf"], None),
    ],
)
def test_the_tower_of_the_same_model_is_chosen_unquantised_if_possible(names: list[str], chosen: str | None) -> None:
    assert best_projector(names, "Qwen3.5-9B-Q4_K_M.gguf") == chosen
