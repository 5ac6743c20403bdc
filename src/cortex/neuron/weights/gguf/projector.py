"""The vision tower of a GGUF model: a file of its own beside the model's, whose name contains `mmproj`.

Its tensors and metadata become those of the hub's checkpoint. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cortex.neuron.weights.gguf.keys import Keys
from cortex.neuron.weights.gguf.metadata import GGUFFile, GGUFTensor

WHOLE_TYPES: Final = {
    "qwen3_5_text": ("qwen3_5", "qwen3vl_merger"),
    "qwen3_5_moe_text": ("qwen3_5_moe", "qwen3vl_merger"),
    "qwen3": ("qwen3_vl", "qwen3vl_merger"),
    "qwen3_moe": ("qwen3_vl_moe", "qwen3vl_merger"),
}
"""`model_type` of a language model → that of the model with its tower, and the kind of tower that it takes."""
_PREFERRED: Final = ("bf16", "f16", "f32")
_NAMES: Final = {
    r"v\.patch_embd\.(weight(?:\.1)?|bias)": "patch_embed.proj.{}",
    r"v\.position_embd\.weight": "pos_embed.weight",
    r"v\.blk\.(\d+)\.ln([12])\.(weight|bias)": "blocks.{}.norm{}.{}",
    r"v\.blk\.(\d+)\.attn_qkv\.(weight|bias)": "blocks.{}.attn.qkv.{}",
    r"v\.blk\.(\d+)\.attn_out\.(weight|bias)": "blocks.{}.attn.proj.{}",
    r"v\.blk\.(\d+)\.ffn_up\.(weight|bias)": "blocks.{}.mlp.linear_fc1.{}",
    r"v\.blk\.(\d+)\.ffn_down\.(weight|bias)": "blocks.{}.mlp.linear_fc2.{}",
    r"v\.post_ln\.(weight|bias)": "merger.norm.{}",
    r"mm\.0\.(weight|bias)": "merger.linear_fc1.{}",
    r"mm\.2\.(weight|bias)": "merger.linear_fc2.{}",
}
_DEEP: Final = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)")
_DEEP_NAMES: Final = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}


def projector_beside(model: Path) -> Path | None:
    """The file with the tower of the model in the file `model`; None: there is none. Unquantised ones come first."""
    try:
        names = sorted(path.name for path in model.parent.iterdir() if path.name != model.name)
    except OSError:
        return None
    chosen = best_projector(names)
    return None if chosen is None else model.parent / chosen


def best_projector(names: list[str]) -> str | None:
    """The tower's file among `names`, which may be paths."""
    found = [name for name in names if name.lower().endswith(".gguf") and "mmproj" in name.lower()]

    def rank(name: str) -> tuple[int, str]:
        kind = next((number for number, each in enumerate(_PREFERRED) if each in name.lower()), len(_PREFERRED))
        return kind, name

    return min(found, key=rank, default=None)


def whole_config(text: Mapping[str, Any], file: GGUFFile) -> dict[str, Any] | None:
    """The config of the model with its tower; None if the file is not the tower of such a model."""
    whole, kind = WHOLE_TYPES.get(str(text.get("model_type")), (None, None))
    if kind is None or file.metadata.get("clip.projector_type") != kind:
        return None
    vision = vision_config(file)
    if vision["out_hidden_size"] != text.get("hidden_size"):
        return None
    return {
        "model_type": whole,
        "text_config": dict(text),
        "vision_config": vision,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }


def vision_config(file: GGUFFile) -> dict[str, Any]:
    """In the hub's format. Raises CheckpointError."""
    keys, tensors = Keys(file, "clip"), file.tensors
    places = tensors.get("v.position_embd.weight")
    return {
        "depth": keys.count("vision.block_count"),
        "hidden_size": keys.count("vision.embedding_length"),
        "intermediate_size": keys.count("vision.feed_forward_length"),
        "num_heads": keys.count("vision.attention.head_count"),
        "patch_size": keys.count("vision.patch_size"),
        "spatial_merge_size": keys.count("vision.spatial_merge_size", 2),
        "out_hidden_size": keys.count("vision.projection_dim"),
        "num_position_embeddings": 0 if places is None else places.shape[0],
        "temporal_patch_size": 1 + ("v.patch_embd.weight.1" in tensors),
        "has_split_frames": True,
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": deep_layers(file),
    }


def processor_config(file: GGUFFile) -> dict[str, Any]:
    """The settings of the image processor, in the hub's format; what the file leaves out is left out."""
    names = {"image_mean": "image_mean", "image_std": "image_std"}
    names |= {"image_min_pixels": "min_pixels", "image_max_pixels": "max_pixels"}
    found = {hub: file.metadata.get(f"clip.vision.{name}") for name, hub in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def deep_layers(file: GGUFFile) -> list[int]:
    flags = file.metadata.get("clip.vision.is_deepstack_layers") or []
    return [index for index, flag in enumerate(flags) if flag]


def tower_tensors(file: GGUFFile) -> Iterator[tuple[str, GGUFTensor]]:
    """The tensors of the tower, by the hub's names."""
    deep = deep_layers(file)
    for name, tensor in file.tensors.items():
        if (found := _DEEP.fullmatch(name)) is not None and int(found[1]) in deep:
            part = f"{deep.index(int(found[1]))}.{_DEEP_NAMES[found[2]]}.{found[3]}"
            yield f"model.visual.deepstack_merger_list.{part}", tensor
            continue
        for pattern, hub in _NAMES.items():
            if (matched := re.fullmatch(pattern, name)) is not None:
                yield f"model.visual.{hub.format(*matched.groups())}", tensor
