"""Vision towers of GGUF models: a file beside the model's, written the way that published ones are converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.text.files import picture_spec
from cortex.neuron.weights.gguf.projector import best_projector

from .gguf_models import write_gguf
from .reference_models import randomised
from .test_towers import run
from .vision_models import QWEN35, QWEN_TOKENS, QWEN_TOWER, VISION_FAMILIES, Prompt, library_inputs, random_image, text

CPU = torch.device("cpu")


def _qwen35() -> Any:
    """With every second layer an attention layer, which rotates a quarter of each head."""
    rope = QWEN35["rope_parameters"] | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    layers = ["linear_attention", "full_attention"] * 2
    text_config = QWEN35 | {"num_hidden_layers": 4, "layer_types": layers, "rope_parameters": rope}
    config = transformers.Qwen3_5Config(text_config=text_config, vision_config=QWEN_TOWER, **QWEN_TOKENS)
    return transformers.Qwen3_5ForConditionalGeneration(config)


BUILDS = {"qwen3_5": _qwen35, "qwen3_vl": VISION_FAMILIES["qwen3_vl"].build}


def write_projector(path: Path, reference: Any) -> None:
    """Names come from the `gguf` package."""
    vision = reference.config.vision_config
    deep = list(getattr(vision, "deepstack_visual_indexes", None) or [])
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    for name, count in {
        "block_count": vision.depth,
        "embedding_length": vision.hidden_size,
        "feed_forward_length": vision.intermediate_size,
        "attention.head_count": vision.num_heads,
        "patch_size": vision.patch_size,
        "spatial_merge_size": vision.spatial_merge_size,
        "projection_dim": vision.out_hidden_size,
        "image_min_pixels": 256,
        "image_max_pixels": 4096,
    }.items():
        writer.add_uint32(f"clip.vision.{name}", count)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.25, 0.5, 0.5])
    writer.add_array("clip.vision.is_deepstack_layers", [index in deep for index in range(vision.depth)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.depth)
    for source, parameter in reference.named_parameters():
        if ".visual." not in source:
            continue
        hub, _, kind = source.removeprefix("model.").rpartition(".")
        values = parameter.detach().float()
        if hub == "visual.patch_embed.proj" and kind == "weight":
            for frame, suffix in enumerate(("", ".1")):
                writer.add_tensor(f"v.patch_embd.weight{suffix}", values[:, :, frame].contiguous().numpy())
            continue
        if "deepstack_merger_list" in hub:
            _, _, index, part = hub.split(".")
            name = f"v.deepstack.{deep[int(index)]}.{part.removeprefix('linear_')}"
        elif hub.startswith("visual.merger."):
            name = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[hub.rpartition(".")[2]]
        else:
            name = names.get_name(hub) or ""
        assert name, hub
        writer.add_tensor(f"{name}.{kind}", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("family", "architecture"), [("qwen3_5", "qwen35"), ("qwen3_vl", "qwen3vl")])
@torch.inference_mode()
def test_pictures_match_the_reference_library(family: str, architecture: str, tmp_path: Path) -> None:
    reference = randomised(BUILDS[family], std=0.12, vector_std=0.3)
    reference.config.text_config.tie_word_embeddings = False
    model = tmp_path / "model-F32.gguf"
    write_gguf(model, architecture, reference)
    write_projector(tmp_path / "mmproj-model-f32.gguf", reference)
    spec = picture_spec(model)
    assert spec is not None
    assert spec == picture_spec(tmp_path)
    assert (spec.patch, spec.merge, spec.least, spec.most, spec.std) == (4, 2, 256, 4096, (0.25, 0.5, 0.5))
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
    reference = randomised(BUILDS["qwen3_5"], std=0.12, vector_std=0.3)
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


def test_unquantised_towers_come_first() -> None:
    names = ["a.gguf", "mmproj-Q8_0.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf", "README.md"]
    assert best_projector(names) == "mmproj-BF16.gguf"
    assert best_projector(["a.gguf"]) is None
