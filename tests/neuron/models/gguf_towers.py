"""Files with the vision towers of reference models, written the way that published ones are converted."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

Converted = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class TowerFile:
    kind: str
    """`clip.projector_type`"""
    tensors: Callable[[str, Tensor, Any], Converted]
    """A tensor of the reference → what the file has for it."""
    options: Callable[[Any], dict[str, Any]] = lambda _: {}
    """From the whole model's config: metadata besides the common sizes."""


def write_projector(path: Path, reference: Any, kind: str, *, swaps_feed_forward: bool = False) -> None:
    """`swaps_feed_forward`: as early files of Gemma 3 have it."""
    row, config, vision = TOWER_FILES[kind], reference.config, reference.config.vision_config
    writer = gguf.GGUFWriter(path, "clip")
    is_mixed = kind.startswith("gemma4")  # these also name the kind of a tower for sounds
    writer.add_string("clip.vision.projector_type" if is_mixed else "clip.projector_type", row.kind)
    for name, count in {
        "block_count": _first(vision, "depth", "num_hidden_layers"),
        "embedding_length": _first(vision, "hidden_size", "mm_embed_dim"),
        "feed_forward_length": _first(vision, "intermediate_size"),
        "attention.head_count": _first(vision, "num_heads", "num_attention_heads"),
        "patch_size": vision.patch_size,
        "projection_dim": config.text_config.hidden_size,
    }.items():
        writer.add_uint32(f"clip.vision.{name}", count)
    options = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 0.5]} | row.options(config)
    for name, value in options.items():
        if isinstance(value, list):
            writer.add_array(f"clip.vision.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"clip.vision.{name}", value)
        else:
            writer.add_uint32(f"clip.vision.{name}", value)
    with torch.no_grad():
        for source, tensor in (*reference.named_parameters(), *reference.named_buffers()):
            if not re.search("visual|vision|multi_modal", source) or source.endswith("position_ids"):
                continue
            for name, values in row.tensors(source.removeprefix("model."), tensor.detach().float(), config):
                written = re.sub("ffn_up|ffn_down", _other, name) if swaps_feed_forward else name
                writer.add_tensor(written, values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _other(found: re.Match[str]) -> str:
    return {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}[found[0]]


def _first(config: Any, *names: str) -> int:
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None) is not None), 0)


def _mapped(hub: str) -> str:
    """By the `gguf` package, from a name without its last part."""
    found = _tensor_names().get_name(hub)
    assert found, hub
    return found


@functools.cache
def _tensor_names() -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)


def _qwen(source: str, values: Tensor, config: Any) -> Converted:
    deep = list(getattr(config.vision_config, "deepstack_visual_indexes", None) or [])
    hub, _, kind = source.rpartition(".")
    if hub == "visual.patch_embed.proj" and kind == "weight":
        yield from ((f"v.patch_embd.weight{suffix}", values[:, :, frame]) for frame, suffix in enumerate(("", ".1")))
    elif "deepstack_merger_list" in hub:
        _, _, index, part = hub.split(".")
        yield f"v.deepstack.{deep[int(index)]}.{part.removeprefix('linear_')}.{kind}", values
    elif hub.startswith("visual.merger."):
        part = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[hub.rpartition(".")[2]]
        yield f"{part}.{kind}", values
    elif kind in ("weight", "bias"):
        yield f"{_mapped(hub)}.{kind}", values


def _qwen_options(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    deep = list(getattr(vision, "deepstack_visual_indexes", None) or [])
    return {
        "spatial_merge_size": vision.spatial_merge_size,
        "image_min_pixels": 256,
        "image_max_pixels": 4096,
        "is_deepstack_layers": [index in deep for index in range(vision.depth)],
    }


def _gemma3(source: str, values: Tensor, config: Any) -> Converted:
    del config
    hub, _, kind = source.replace("_weight", ".weight").rpartition(".")
    if hub.startswith("vision_tower.") and "vision_model" not in hub:
        hub = hub.replace("vision_tower.", "vision_tower.vision_model.")
    yield f"{_mapped(hub)}.{kind}", values + 1 if "soft_emb_norm" in hub else values


def _gemma3_options(config: Any) -> dict[str, Any]:
    vision = config.vision_config
    side = vision.image_size // vision.patch_size
    scale = side // int(config.mm_tokens_per_image**0.5)
    eps = vision.layer_norm_eps
    return {"image_size": vision.image_size, "projector.scale_factor": scale, "attention.layer_norm_epsilon": eps}


def _gemma4(source: str, values: Tensor, config: Any) -> Converted:
    patch = config.vision_config.patch_size
    if "inv_freq" in source:
        return
    source = source.replace("vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    if source.endswith("position_embedding_table"):
        yield "v.position_embd.weight", values
    elif source.endswith("input_proj.weight"):
        yield "v.patch_embd.weight", values.view(-1, patch, patch, 3).permute(0, 3, 1, 2)
    elif source.endswith(("std_bias", "std_scale")):
        yield f"v.{source.rpartition('.')[2]}", values
    else:
        hub, _, kind = source.rpartition(".")
        prefix = "" if hub.startswith("vision_model.") else "model."
        yield f"{_mapped(prefix + hub)}.{kind}", values.reshape(1) if values.dim() == 0 else values


def _gemma4_options(config: Any) -> dict[str, Any]:
    del config
    return {"image_size": 224, "image_mean": [0.0] * 3, "image_std": [1.0] * 3, "attention.layer_norm_epsilon": 1e-6}


def _gemma4_unified(source: str, values: Tensor, config: Any) -> Converted:
    patch = config.vision_config.patch_size * config.vision_config.pooling_kernel_size
    part, _, kind = source.removeprefix("embed_vision.").rpartition(".")

    def by_colour(tensor: Tensor) -> Tensor:
        return tensor.view(*tensor.shape[:-1], patch, patch, 3).movedim(-1, -3).flatten(-3)

    if source.endswith("pos_embedding"):
        yield "v.position_embd.weight", values.permute(1, 0, 2)
    elif part == "patch_dense":
        yield f"v.patch_embd.{kind}", by_colour(values) if kind == "weight" else values
    elif part == "patch_ln1":
        yield f"v.patch_norm.1.{kind}", by_colour(values)
    elif part in ("patch_ln2", "pos_norm"):
        yield f"v.patch_norm.{2 if part == 'patch_ln2' else 3}.{kind}", values
    elif "embedding_projection" in source:
        yield "mm.input_projection.weight", values


def _pixtral(source: str, values: Tensor, config: Any) -> Converted:
    hub, _, kind = source.rpartition(".")
    if kind not in ("weight", "bias"):
        return
    if hub.endswith(("q_proj", "k_proj")):  # rotary pairs side by side
        heads = config.vision_config.num_attention_heads
        values = values.view(heads, 2, -1, values.shape[-1]).transpose(1, 2).reshape(values.shape)
    yield f"{_mapped(hub)}.{kind}", values


def _pixtral_options(config: Any) -> dict[str, Any]:
    sizes = {"image_size": config.vision_config.image_size, "spatial_merge_size": config.spatial_merge_size}
    return sizes | {"attention.layer_norm_epsilon": 1e-5}


_QWEN = TowerFile("qwen3vl_merger", _qwen, _qwen_options)
TOWER_FILES = {
    "qwen3_5": _QWEN,
    "qwen3_vl": _QWEN,
    "gemma3": TowerFile("gemma3", _gemma3, _gemma3_options),
    "gemma4": TowerFile("gemma4v", _gemma4, _gemma4_options),
    "gemma4, whole": TowerFile("gemma4v", _gemma4, _gemma4_options),
    "gemma4_unified": TowerFile("gemma4uv", _gemma4_unified, _gemma4_options),
    "mistral3": TowerFile("pixtral", _pixtral, _pixtral_options),
}
"""By the family in `vision_models.py`."""
