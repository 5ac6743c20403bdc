"""Tiny models of the reference library that take pictures, and prompts with pictures for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.pictures.picture import Picture, PictureGrid, content_key
from cortex.neuron.pictures.spec import PictureSpec, prepare
from cortex.neuron.text.files import picture_spec

from ..tiny_models import tiny_delta, tiny_sizes
from .reference_models import randomised

VOCAB, PICTURE = 97, 90
"""The token at the positions of pictures."""
SIZES: dict[str, Any] = {
    **tiny_sizes(vocab_size=VOCAB, hidden_size=48, intermediate_size=64),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "pad_token_id": None,
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True}
QWEN35 = {
    **SIZES,
    **tiny_delta(),
    "num_hidden_layers": 3,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "rope_parameters": QWEN_ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]},
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
QWEN_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
    "patch_size": 4,
}
QWEN_TOKENS = {"image_token_id": PICTURE, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93}
QWEN_PROCESSOR = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "image_mean": [0.5] * 3, "image_std": [0.4] * 3}


@dataclass(frozen=True, slots=True)
class VisionFamily:
    build: Callable[[], Any]
    processor: dict[str, Any]


def _qwen35() -> Any:
    config = transformers.Qwen3_5Config(text_config=QWEN35, vision_config=QWEN_TOWER, **QWEN_TOKENS)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _qwen35_moe() -> Any:
    text = QWEN35 | EXPERTS
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=QWEN_TOWER, **QWEN_TOKENS)
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


def _qwen3_vl() -> Any:
    text = SIZES | {"num_hidden_layers": 3, "rope_parameters": QWEN_ROPE | {"mrope_section": [4, 2, 2]}}
    tower = QWEN_TOWER | {"deepstack_visual_indexes": [0, 2]}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=tower, **QWEN_TOKENS)
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen3_vl_moe() -> Any:
    text = (
        SIZES
        | EXPERTS
        | {"shared_expert_intermediate_size": 0, "rope_parameters": QWEN_ROPE | {"mrope_section": [4, 2, 2]}}
    )
    tower = QWEN_TOWER | {"deepstack_visual_indexes": [1]}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=tower, **QWEN_TOKENS)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


TOWER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}


def _mistral3() -> Any:
    tower = TOWER | {"model_type": "pixtral", "head_dim": 16, "image_size": 64, "patch_size": 4, "hidden_act": "silu"}
    text = SIZES | {"model_type": "mistral", "sliding_window": None}
    config = transformers.Mistral3Config(
        text_config=text, vision_config=tower, image_token_id=PICTURE, spatial_merge_size=2, vision_feature_layer=-1
    )
    return transformers.Mistral3ForConditionalGeneration(config)


WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_hidden_layers": 3}


def gemma3(text: dict[str, Any]) -> Any:
    tower = TOWER | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 4, "vision_use_head": False}
    config = transformers.Gemma3Config(
        text_config=SIZES | {"sliding_window": 9, "query_pre_attn_scalar": 16} | text,
        vision_config=tower,
        mm_tokens_per_image=16,
        image_token_id=PICTURE,
        boi_token_index=91,
        eoi_token_index=92,
        tie_word_embeddings=True,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


GEMMA4_TEXT = {
    **(SIZES | WINDOWS),
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "global_head_dim": 32,
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
}


def _gemma4(tower: dict[str, Any], text: dict[str, Any]) -> Any:
    vision = {
        **TOWER,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 64,
        **tower,
    }
    config = transformers.Gemma4Config(
        text_config=GEMMA4_TEXT | text, vision_config=vision, audio_config=None, image_token_id=PICTURE
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def _gemma4_unified() -> Any:
    vision = {"patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 32, "mm_posemb_size": 64}
    vision["output_proj_dims"] = 32
    config = transformers.Gemma4UnifiedConfig(
        text_config=GEMMA4_TEXT | {"sliding_window": 24},
        vision_config=vision,
        audio_config=None,
        image_token_id=PICTURE,
    )
    return transformers.Gemma4UnifiedForConditionalGeneration(config)


GEMMA4_PROCESSOR = {"max_soft_tokens": 20, "do_normalize": False}
VISION_FAMILIES = {
    "qwen3_vl": VisionFamily(_qwen3_vl, QWEN_PROCESSOR),
    "qwen3_vl_moe": VisionFamily(_qwen3_vl_moe, QWEN_PROCESSOR),
    "mistral3": VisionFamily(_mistral3, {"size": {"longest_edge": 64}}),
    "gemma3": VisionFamily(lambda: gemma3(WINDOWS), {"size": {"height": 32, "width": 32}, "resample": 2}),
    "gemma4": VisionFamily(
        lambda: _gemma4(
            {"use_clipped_linears": True, "standardize": True},
            {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB},
        ),
        GEMMA4_PROCESSOR,
    ),
    "gemma4, whole": VisionFamily(lambda: _gemma4({}, {"use_bidirectional_attention": "vision"}), GEMMA4_PROCESSOR),
    "gemma4_unified": VisionFamily(_gemma4_unified, GEMMA4_PROCESSOR),
    "qwen3_5": VisionFamily(_qwen35, QWEN_PROCESSOR),
    "qwen3_5_moe": VisionFamily(_qwen35_moe, QWEN_PROCESSOR),
}


def random_reference(family: str, build: Callable[[], Any] | None = None) -> Any:
    """A random model of the library. `build`: instead of the family's."""
    reference = randomised(build or VISION_FAMILIES[family].build, std=0.12, vector_std=0.3)
    for name, buffer in reference.named_buffers():
        if ".std_" in name:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
        if name.endswith(("put_min", "put_max")):
            buffer.fill_(-1.1 if name.endswith("min") else 1.3)
    return reference


def write_vision_model(family: str, folder: Path) -> Any:
    """Saves a random model, and returns it as the library has it."""
    reference = random_reference(family)
    reference.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(VISION_FAMILIES[family].processor))
    return reference


def spec_of(folder: Path) -> PictureSpec:
    spec = picture_spec(folder)
    assert spec is not None
    return spec


def random_image(width: int, height: int, seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens, with pictures among them."""

    tokens: tuple[int, ...]
    pictures: tuple[Picture, ...]

    @classmethod
    def of(cls, spec: PictureSpec, parts: Sequence[Sequence[int] | Image.Image]) -> Prompt:
        tokens: list[int] = []
        pictures: list[Picture] = []
        for part in parts:
            if isinstance(part, Image.Image):
                grid = spec.grid(*part.size)
                key = content_key(part.tobytes(), grid, spec.digest)
                pictures.append(Picture(len(tokens), grid, key, prepare(spec, grid, part).tobytes()))
                tokens += picture_tokens(grid)
            else:
                tokens += part
        return cls(tuple(tokens), tuple(pictures))

    def request(self, name: str, max_tokens: int = 8, **options: Any) -> EngineRequest:
        sampling = SamplingParams(temperature=0.0)
        return EngineRequest(name, self.tokens, max_tokens, sampling, pictures=self.pictures, **options)


def picture_tokens(grid: PictureGrid) -> list[int]:
    offsets = set(grid.feature_offsets())
    return [PICTURE if at in offsets else PICTURE + 1 for at in range(grid.num_tokens)]


def text(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, PICTURE - 1, count)]


def library_inputs(spec: PictureSpec, prompt: Prompt, family: str) -> dict[str, Any]:
    """The same prompt for the library's model."""
    ids = torch.tensor([prompt.tokens])
    inputs: dict[str, Any] = {"input_ids": ids}
    if not prompt.pictures:
        return inputs
    arrays = [
        np.frombuffer(picture.pixels, np.uint8).reshape(picture.grid.height, picture.grid.width, 3)
        for picture in prompt.pictures
    ]
    normalised = [((each / 255 - np.array(spec.mean)) / np.array(spec.std)).astype(np.float32) for each in arrays]
    if spec.sizing != "edge":
        inputs["token_type_ids" if spec.sizing == "square" else "mm_token_type_ids"] = (ids == PICTURE).int()
    return inputs | LIBRARY_PIXELS[spec.sizing](spec, normalised, family)


def _qwen_pixels(spec: PictureSpec, pictures: list[Any], family: str) -> dict[str, Any]:
    del family
    patch, merge = spec.patch, spec.merge
    values, grids = [], []
    for pixels in pictures:
        rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
        shaped = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        patches = shaped.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None].repeat(2, axis=5)
        values.append(patches.reshape(rows * columns, -1))
        grids.append([1, rows, columns])
    return {"pixel_values": torch.from_numpy(np.concatenate(values)), "image_grid_thw": torch.tensor(grids)}


def _pixtral_pixels(spec: PictureSpec, pictures: list[Any], family: str) -> dict[str, Any]:
    del spec, family
    height, width = (max(each.shape[axis] for each in pictures) for axis in (0, 1))
    padded = [np.pad(each, ((0, height - each.shape[0]), (0, width - each.shape[1]), (0, 0))) for each in pictures]
    values = torch.from_numpy(np.stack(padded).transpose(0, 3, 1, 2).copy())
    return {"pixel_values": values, "image_sizes": torch.tensor([each.shape[:2] for each in pictures])}


def _gemma3_pixels(spec: PictureSpec, pictures: list[Any], family: str) -> dict[str, Any]:
    del spec, family
    return {"pixel_values": torch.from_numpy(np.stack(pictures).transpose(0, 3, 1, 2).copy())}


def _gemma4_pixels(spec: PictureSpec, pictures: list[Any], family: str) -> dict[str, Any]:
    """Padded to the largest number of patches. The unified model has larger patches."""
    patch = spec.side if family == "gemma4_unified" else spec.patch
    values, places = [], []
    for pixels in pictures:
        rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
        patches = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
        x, y = np.meshgrid(np.arange(columns), np.arange(rows))
        most = 20 * (spec.side // patch) ** 2
        values.append(np.pad(patches, ((0, most - len(patches)), (0, 0))))
        place = np.stack((x, y), axis=-1).reshape(-1, 2)
        places.append(np.pad(place, ((0, most - len(place)), (0, 0)), constant_values=-1))
    return {
        "pixel_values": torch.from_numpy(np.stack(values)),
        "image_position_ids": torch.from_numpy(np.stack(places)),
    }


LIBRARY_PIXELS = {"area": _qwen_pixels, "edge": _pixtral_pixels, "square": _gemma3_pixels, "budget": _gemma4_pixels}
