"""The kinds of vision towers in GGUF files: their tensors and metadata, as those of the hub's checkpoint. Needs no
torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from cortex.neuron.families import towers
from cortex.neuron.families.registry import FAMILIES
from cortex.neuron.families.towers import TowerLayer
from cortex.neuron.weights.errors import Malformed, Unsupported
from cortex.neuron.weights.gguf.keys import Keys
from cortex.neuron.weights.gguf.metadata import GGUFFile
from cortex.neuron.weights.gguf.types import READABLE
from cortex.neuron.weights.mapping import MappedFile
from cortex.neuron.weights.stored import Adjustment, StoredTensor

_LAYER: Final = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(\w+)")
_END: Final = re.compile(r"(.+?)\.(weight(?:\.1)?|bias)")
_RANGES: Final = ("input_min", "input_max", "output_min", "output_max")
_DEEP: Final = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)")
_DEEP_NAMES: Final = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_SWAPPED: Final = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}

Options = Callable[[Keys, GGUFFile], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class TowerKind:
    """How files with one `projector_type` are read."""

    vision: Options
    """The options of `vision_config` besides those that all kinds have."""
    layer: TowerLayer | None
    """None: it has no layers."""
    ends: Mapping[str, str]
    """Tensors outside of the layers, by name with or without the last part."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """The hub's names of the sizes that differ from `_SIZES`."""
    whole: Options = lambda _keys, _file: {}
    """The options of the whole model's config."""
    needed: str = "v.patch_embd.weight"
    """A tensor that a model of another family with the same `projector_type` does not have."""


def projector_type(file: GGUFFile) -> str | None:
    """Files that also have a tower for sounds name the kinds of both."""
    metadata = file.metadata
    found = metadata.get("clip.vision.projector_type") or metadata.get("clip.projector_type")
    return found if isinstance(found, str) else None


def tower_options(file: GGUFFile) -> dict[str, Any] | None:
    """`vision_config`, and the options besides it, in the hub's format; None: the kind of the tower is not known.
    Raises CheckpointError."""
    kind = KINDS.get(projector_type(file) or "")
    if kind is None or kind.needed not in file.tensors:
        return None
    keys = Keys(file, "clip")
    sizes = {kind.sizes.get(hub, hub): keys.count(f"vision.{name}") for hub, name in _SIZES.items() if kind.layer}
    vision = sizes | {"patch_size": keys.count("vision.patch_size")} | kind.vision(keys, file)
    return {"vision_config": vision, **kind.whole(keys, file)}


def tower_tensors(file: GGUFFile, mapped: MappedFile) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of the tower, by the hub's names. Raises CheckpointError."""
    kind = KINDS[projector_type(file) or ""]
    heads = Keys(file, "clip").count("vision.attention.head_count", 1) if kind.layer else 1
    is_swapped = _is_swapped(file)
    for name, tensor in file.tensors.items():
        if (hub := _hub_name(kind, file, name, is_swapped=is_swapped)) is None:
            continue
        if tensor.type.name not in READABLE:
            raise Unsupported(
                f"{file.path}: {name[:200]} is in {tensor.type.name}, which is not supported; choose a file in one of "
                f"{', '.join(READABLE)}"
            )
        stored = StoredTensor(mapped, tensor.offset, tensor.shape, tensor.type.name, tensor.num_bytes, name=name[:200])
        if name == "mm.soft_emb_norm.weight":
            stored = replace(stored, adjustment=Adjustment.PLUS_ONE)
        if kind is _PIXTRAL and re.fullmatch(r"v\.blk\.\d+\.attn_[qk]\.weight", name):
            if tensor.shape[0] % (2 * heads):
                raise Malformed(f"{file.path}: {name} is not {heads} heads of even size; convert the model again")
            stored = replace(stored, interleaved_rows=tensor.shape[0] // heads)
        if name.endswith(_RANGES):
            stored = replace(stored, shape=())
        yield hub, stored


def _is_swapped(file: GGUFFile) -> bool:
    """Converters of Gemma 3 once named the two matrices of the feed-forward block after each other."""
    up, width = file.tensors.get("v.blk.0.ffn_up.weight"), file.metadata.get("clip.vision.embedding_length")
    return projector_type(file) == "gemma3" and up is not None and up.shape[0] == width


def _hub_name(kind: TowerKind, file: GGUFFile, name: str, *, is_swapped: bool) -> str | None:
    """None: a tensor that the model does not need."""
    if (whole := kind.ends.get(name)) is not None:
        return whole
    if kind.layer is not None and (layer := _LAYER.fullmatch(name)) is not None:
        number, part, what = layer.groups()
        hub = kind.layer.gguf_names.get(_SWAPPED.get(part, part) if is_swapped else part)
        if hub is None:
            return None
        owner = hub.removesuffix(".linear") if what in _RANGES else hub
        return f"{kind.layer.path.format(number)}.{owner}.{what}"
    if (deep := _DEEP.fullmatch(name)) is not None and int(deep[1]) in (numbers := deep_layers(file)):
        part = f"{numbers.index(int(deep[1]))}.{_DEEP_NAMES[deep[2]]}.{deep[3]}"
        return f"model.visual.deepstack_merger_list.{part}"
    if (end := _END.fullmatch(name)) is not None and (hub := kind.ends.get(end[1])) is not None:
        return f"{hub}.{end[2]}"
    return None


def deep_layers(file: GGUFFile) -> list[int]:
    flags = file.metadata.get("clip.vision.is_deepstack_layers") or []
    return [index for index, flag in enumerate(flags) if flag]


def _rows(file: GGUFFile, name: str, dimension: int = 0) -> int:
    """The size of a tensor's dimension; 0: the file has no such tensor, which loading reports."""
    tensor = file.tensors.get(name)
    return tensor.shape[dimension] if tensor is not None and len(tensor.shape) > dimension else 0


_SIZES: Final = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
}
_EPS: Final = "vision.attention.layer_norm_epsilon"


def _qwen(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    return {
        "spatial_merge_size": keys.count("vision.spatial_merge_size", 2),
        "out_hidden_size": keys.count("vision.projection_dim"),
        "num_position_embeddings": _rows(file, "v.position_embd.weight"),
        "temporal_patch_size": 1 + ("v.patch_embd.weight.1" in file.tensors),
        "has_split_frames": True,
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": deep_layers(file),
    }


def _gemma3(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    del file
    return {"image_size": keys.count("vision.image_size", 896), "layer_norm_eps": keys.number(_EPS, 1e-6)}


def _gemma3_whole(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    del file
    patches = keys.count("vision.image_size", 896) // keys.count("vision.patch_size")
    return {"mm_tokens_per_image": (patches // keys.count("vision.projector.scale_factor", 4)) ** 2}


def _gemma4(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    return {
        "head_dim": _rows(file, "v.blk.0.attn_q.weight") // keys.count("vision.attention.head_count"),
        "pooling_kernel_size": keys.count("vision.projector.scale_factor", 3),
        "position_embedding_size": _rows(file, "v.position_embd.weight", 1),
        "rms_norm_eps": keys.number(_EPS, 1e-6),
        "standardize": "v.std_bias" in file.tensors,
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in file.tensors,
        "is_repacked": True,
    }


def _gemma4_unified(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    return {
        "mm_embed_dim": keys.count("vision.embedding_length"),
        "pooling_kernel_size": keys.count("vision.projector.scale_factor", 3),
        "mm_posemb_size": _rows(file, "v.position_embd.weight", 1),
        "is_repacked": True,
    }


def _pixtral(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    uses_silu = file.metadata.get("clip.use_silu", True)
    return {
        "model_type": "pixtral",
        "image_size": keys.count("vision.image_size", 1540),
        "hidden_act": "silu" if uses_silu else "gelu",
        "rope_theta": 10_000.0,
    }


def _pixtral_whole(keys: Keys, file: GGUFFile) -> dict[str, Any]:
    return {
        "spatial_merge_size": keys.count("vision.spatial_merge_size", 1),
        "multimodal_projector_bias": "mm.1.bias" in file.tensors,
        "vision_feature_layer": -1,
    }


_QWEN: Final = TowerKind(
    vision=_qwen,
    layer=towers.QWEN,
    ends={
        "v.patch_embd": "model.visual.patch_embed.proj",
        "v.position_embd": "model.visual.pos_embed",
        "v.post_ln": "model.visual.merger.norm",
        "mm.0": "model.visual.merger.linear_fc1",
        "mm.2": "model.visual.merger.linear_fc2",
    },
    sizes={"num_hidden_layers": "depth", "num_attention_heads": "num_heads"},
)
_GEMMA3: Final = TowerKind(
    vision=_gemma3,
    whole=_gemma3_whole,
    layer=towers.SIGLIP,
    ends={
        "v.patch_embd": "model.vision_tower.embeddings.patch_embedding",
        "v.position_embd": "model.vision_tower.embeddings.position_embedding",
        "v.post_ln": "model.vision_tower.post_layernorm",
        "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm",
        "mm.input_projection.weight": "model.multi_modal_projector.mm_input_projection_weight",
    },
)
_GEMMA4: Final = TowerKind(
    vision=_gemma4,
    layer=towers.GEMMA4,
    ends={
        "v.patch_embd": "model.vision_tower.patch_embedder.input_proj",
        "v.position_embd.weight": "model.vision_tower.patch_embedder.position_embedding_table",
        "v.std_bias": "model.vision_tower.std_bias",
        "v.std_scale": "model.vision_tower.std_scale",
        "mm.input_projection": "model.embed_vision.embedding_projection",
    },
)
_GEMMA4_UNIFIED: Final = TowerKind(
    vision=_gemma4_unified,
    layer=None,
    ends={
        "v.patch_embd": "model.vision_embedder.patch_dense",
        "v.patch_norm.1": "model.vision_embedder.patch_ln1",
        "v.patch_norm.2": "model.vision_embedder.patch_ln2",
        "v.patch_norm.3": "model.vision_embedder.pos_norm",
        "v.position_embd.weight": "model.vision_embedder.pos_embedding",
        "mm.input_projection": "model.embed_vision.embedding_projection",
    },
)
_PIXTRAL: Final = TowerKind(
    vision=_pixtral,
    whole=_pixtral_whole,
    needed="mm.patch_merger.weight",
    layer=towers.PIXTRAL,
    ends={
        "v.patch_embd": "model.vision_tower.patch_conv",
        "v.pre_ln": "model.vision_tower.ln_pre",
        "mm.input_norm": "model.multi_modal_projector.norm",
        "mm.patch_merger": "model.multi_modal_projector.patch_merger.merging_layer",
        "mm.1": "model.multi_modal_projector.linear_1",
        "mm.2": "model.multi_modal_projector.linear_2",
    },
)
KINDS: Final[Mapping[str, TowerKind]] = {
    "qwen3vl_merger": _QWEN,
    "gemma3": _GEMMA3,
    "gemma4v": _GEMMA4,
    "gemma4uv": _GEMMA4_UNIFIED,
    "pixtral": _PIXTRAL,
}
"""By `projector_type`."""


_PREFERRED: Final = ("bf16", "f16", "f32")


def projector_of(model: Path) -> Path | None:
    """The file with the tower of the model in the file `model`; None: there is none. Repositories of the hub may have
    models in folders, and the tower above them."""
    folders = [model.parent]
    if model.parent.parent.parent.name == "snapshots":
        folders.append(model.parent.parent)
    for folder in folders:
        try:
            chosen = best_projector([path.name for path in folder.iterdir()], model.name)
        except OSError:
            return None
        if chosen is not None:
            return folder / chosen
    return None


def is_projector(path: str) -> bool:
    name = PurePosixPath(path).name.lower()
    return name.endswith(".gguf") and "mmproj" in name


def best_projector(paths: Iterable[str], model: str) -> str | None:
    """The tower's file among `paths` for the model in a file of this name: one whose name is most like the model's, as
    several models may be in one folder. Unquantised ones come first, those of 16 bits before those of 32."""
    words = _words(model)

    def rank(path: str) -> tuple[int, int, str]:
        name = PurePosixPath(path).name.lower()
        kind = next((number for number, each in enumerate(_PREFERRED) if each in name), len(_PREFERRED))
        return -len(words & _words(path)), kind, path

    return min((path for path in paths if is_projector(path) and path != model), key=rank, default=None)


def _words(path: str) -> set[str]:
    """The parts of a file's name that say which model it is of."""
    return set(re.split(r"[-_.]", PurePosixPath(path).name.lower())) - {"", "gguf", "mmproj", *_PREFERRED}


def whole_config(text: Mapping[str, Any], file: GGUFFile) -> dict[str, Any] | None:
    """The config of the model with its tower; None if the file is not the tower of such a model."""
    kind, model_type = projector_type(file) or "", str(text.get("model_type"))
    whole = next((family for family in FAMILIES if model_type in family.projectors.get(kind, ())), None)
    if whole is None or file.metadata.get("clip.vision.projection_dim") != text.get("hidden_size"):
        return None
    options = tower_options(file)
    if options is None:
        return None
    return {
        "model_type": whole.model_types[0],
        "text_config": {**text, **whole.beside_tower(text)},
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        **options,
    }


def picture_config(file: GGUFFile) -> dict[str, Any] | None:
    """The picture options of the whole model's config; None if the kind of tower is unknown."""
    kind = projector_type(file) or ""
    whole = next((family for family in FAMILIES if kind in family.projectors), None)
    options = tower_options(file)
    return None if whole is None or options is None else {"model_type": whole.model_types[0], **options}


def processor_config(file: GGUFFile) -> dict[str, Any]:
    """The settings of the image processor, in the hub's format; what the file leaves out is left out."""
    names = {"image_mean": "image_mean", "image_std": "image_std"}
    names |= {"image_min_pixels": "min_pixels", "image_max_pixels": "max_pixels"}
    found = {hub: file.metadata.get(f"clip.vision.{name}") for name, hub in names.items()}
    return {name: value for name, value in found.items() if value is not None}
