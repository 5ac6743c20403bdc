"""The kinds of vision towers, read from the whole model's config. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cortex.neuron.families import towers
from cortex.neuron.families.registry import family_of
from cortex.neuron.models.config import UnsupportedModel, count_in, layer_count_in, number_in
from cortex.neuron.models.towers.config import Activation, TowerConfig, TowerTensor, side_of
from cortex.neuron.pictures.picture import PictureRules

Json = Mapping[str, Any]

_ACTIVATIONS: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}


@dataclass(frozen=True, slots=True)
class QwenTowerConfig(TowerConfig):
    """Qwen3-VL and Qwen3.5."""

    table_side: int = 0
    """The side of the table of places, which is stretched over each picture."""
    frames: int = 2
    has_split_frames: bool = False
    """Whether the patches of each frame have a tensor of their own, as in GGUF files."""

    def ends(self) -> Iterator[tuple[str, TowerTensor]]:
        name = f"{self.prefix}.patch_embed.proj"
        if self.has_split_frames:
            shape: tuple[int, ...] = (self.hidden, 3, self.patch, self.patch)
            yield "patch", TowerTensor({f"{name}.weight": self.hidden}, self.patch_values, shape)
            if self.frames > 1:
                yield "patch_later", TowerTensor({f"{name}.weight.1": self.hidden}, self.patch_values, shape)
        else:
            shape = (self.hidden, 3, self.frames, self.patch, self.patch)
            yield "patch", TowerTensor({f"{name}.weight": self.hidden}, self.patch_values, shape, self.frames)
        yield "patch.bias", TowerTensor({f"{name}.bias": self.hidden})
        yield "places", TowerTensor({f"{self.prefix}.pos_embed.weight": self.table_side**2}, self.hidden)
        yield from self._merger("merger", f"{self.prefix}.merger", self.hidden)
        for index in range(len(self.deep_layers)):
            width = self.hidden * self.merge**2
            yield from self._merger(f"deep{index}", f"{self.prefix}.deepstack_merger_list.{index}", width)

    def _merger(self, role: str, name: str, norm_size: int) -> Iterator[tuple[str, TowerTensor]]:
        width = self.hidden * self.merge**2
        yield from self.norm(f"{role}.norm", f"{name}.norm", norm_size)
        yield from self.linear(f"{role}.up", {f"{name}.linear_fc1": width}, width)
        yield from self.linear(f"{role}.down", {f"{name}.linear_fc2": self.out}, width)


def _qwen(vision: Json, whole: Json, hidden: int) -> TowerConfig:
    del whole
    heads, width = count_in(vision, "num_heads", 16), count_in(vision, "hidden_size", 1152)
    out = count_in(vision, "out_hidden_size", 3584)
    if out != hidden:
        raise UnsupportedModel(f"the vision tower makes vectors of {out} values, the model takes {hidden}")
    return QwenTowerConfig(
        prefix="model.visual",
        layers=layer_count_in(vision, "depth", 27),
        hidden=width,
        heads=heads,
        head_dim=width // heads,
        inner=count_in(vision, "intermediate_size", 4304),
        patch=count_in(vision, "patch_size", 16),
        merge=count_in(vision, "spatial_merge_size", 2),
        out=out,
        names=towers.QWEN,
        activation=_activation(vision, "gelu_pytorch_tanh"),
        deep_layers=tuple(vision.get("deepstack_visual_indexes") or ()),
        rules=PictureRules(has_axes=True),
        table_side=_side(count_in(vision, "num_position_embeddings", 2304)),
        frames=count_in(vision, "temporal_patch_size", 2),
        has_split_frames=bool(vision.get("has_split_frames")),
    )


@dataclass(frozen=True, slots=True)
class PixtralTowerConfig(TowerConfig):
    """Mistral 3: rotation by rows and columns, and squares of patches that become one vector each."""

    theta: float = 10_000.0
    projector_eps: float = 1e-5
    projector_bias: bool = False
    projector_activation: Activation = "gelu"

    def ends(self) -> Iterator[tuple[str, TowerTensor]]:
        shape, projector = (self.hidden, 3, self.patch, self.patch), "model.multi_modal_projector"
        yield "patch", TowerTensor({f"{self.prefix}.patch_conv.weight": self.hidden}, self.patch_values, shape)
        yield from self.norm("patch_norm", f"{self.prefix}.ln_pre", self.hidden)
        yield from self.norm("out_norm", f"{projector}.norm", self.hidden)
        merged = {f"{projector}.patch_merger.merging_layer": self.hidden}
        yield from self.linear("merge", merged, self.hidden * self.merge**2)
        for number, columns in ((1, self.hidden), (2, self.out)):
            name = f"{projector}.linear_{number}"
            yield from self.linear(f"out{number}", {name: self.out}, columns, bias=self.projector_bias)


def _pixtral(vision: Json, whole: Json, hidden: int) -> TowerConfig:
    if whole.get("vision_feature_layer", -1) != -1 or vision.get("model_type", "pixtral") != "pixtral":
        raise UnsupportedModel("this vision tower of Mistral 3 is not supported")
    heads, width = count_in(vision, "num_attention_heads", 16), count_in(vision, "hidden_size", 1024)
    rope, text = vision.get("rope_parameters") or vision, whole.get("text_config") or {}
    return PixtralTowerConfig(
        prefix="model.vision_tower",
        layers=layer_count_in(vision, "num_hidden_layers", 24),
        hidden=width,
        heads=heads,
        head_dim=width // heads,
        inner=count_in(vision, "intermediate_size", 4096),
        patch=count_in(vision, "patch_size", 16),
        merge=count_in(whole, "spatial_merge_size", 2),
        out=hidden,
        names=towers.PIXTRAL,
        eps=1e-5,
        is_rms=True,
        bias=False,
        activation=_activation(vision, "gelu"),
        theta=number_in(rope, "rope_theta", 10_000.0),
        projector_eps=number_in(text, "rms_norm_eps", 1e-5),
        projector_bias=bool(whole.get("multimodal_projector_bias", False)),
        projector_activation=_ACTIVATIONS.get(str(whole.get("projector_hidden_act", "gelu")), "gelu"),
    )


@dataclass(frozen=True, slots=True)
class SiglipTowerConfig(TowerConfig):
    """Gemma 3: a place for each patch of pictures that all have one size, averaged in squares."""

    num_places: int = 0

    def ends(self) -> Iterator[tuple[str, TowerTensor]]:
        shape, name = (self.hidden, 3, self.patch, self.patch), f"{self.prefix}.embeddings.patch_embedding"
        yield "patch", TowerTensor({f"{name}.weight": self.hidden}, self.patch_values, shape)
        yield "patch.bias", TowerTensor({f"{name}.bias": self.hidden})
        places = f"{self.prefix}.embeddings.position_embedding.weight"
        yield "places", TowerTensor({places: self.num_places}, self.hidden)
        yield from self.norm("out_norm", f"{self.prefix}.post_layernorm", self.hidden)
        projector = "model.multi_modal_projector"
        yield "average_norm", TowerTensor({f"{projector}.mm_soft_emb_norm.weight": self.hidden})
        yield "out", TowerTensor({f"{projector}.mm_input_projection_weight": self.hidden}, self.out)


def _siglip(vision: Json, whole: Json, hidden: int) -> TowerConfig:
    heads, width = count_in(vision, "num_attention_heads", 12), count_in(vision, "hidden_size", 768)
    patch, side = count_in(vision, "patch_size", 16), count_in(vision, "image_size", 224)
    patches = side // patch
    merge = patches // _side(count_in(whole, "mm_tokens_per_image", 256))
    return SiglipTowerConfig(
        prefix="model.vision_tower",
        layers=layer_count_in(vision, "num_hidden_layers", 12),
        hidden=width,
        heads=heads,
        head_dim=width // heads,
        inner=count_in(vision, "intermediate_size", 3072),
        patch=patch,
        merge=merge,
        out=hidden,
        names=towers.SIGLIP,
        eps=number_in(vision, "layer_norm_eps", 1e-6),
        activation=_activation(vision, "gelu_pytorch_tanh"),
        rules=PictureRules(is_whole=True),
        num_places=patches**2,
    )


@dataclass(frozen=True, slots=True)
class Gemma4TowerConfig(TowerConfig):
    """Gemma 4: places by row and column, rotation by both, averages of squares."""

    theta: float = 100.0
    num_places: int = 0
    is_standardised: bool = False
    is_repacked: bool = False
    """Whether the values of a patch are sorted by colour, as in GGUF files, instead of by pixel."""

    def ends(self) -> Iterator[tuple[str, TowerTensor]]:
        name = f"{self.prefix}.patch_embedder"
        packed = (self.hidden, 3, self.patch, self.patch) if self.is_repacked else None
        yield "patch", TowerTensor({f"{name}.input_proj.weight": self.hidden}, self.patch_values, packed)
        shape = (2, self.num_places, self.hidden)
        yield "places", TowerTensor({f"{name}.position_embedding_table": 2 * self.num_places}, self.hidden, shape)
        if self.is_standardised:
            for part in ("bias", "scale"):
                yield f"std_{part}", TowerTensor({f"{self.prefix}.std_{part}": self.hidden})
        yield from self.linear("out", {"model.embed_vision.embedding_projection": self.out}, self.hidden)


def _gemma4_rules(whole: Json, default: str | None) -> PictureRules:
    text = whole.get("text_config") or {}
    return PictureRules(is_whole=text.get("use_bidirectional_attention", default) == "vision")


def _gemma4(vision: Json, whole: Json, hidden: int) -> TowerConfig:
    heads, width = count_in(vision, "num_attention_heads", 12), count_in(vision, "hidden_size", 768)
    if count_in(vision, "num_key_value_heads", heads) != heads:
        raise UnsupportedModel("a vision tower whose heads share keys and values is not supported")
    rope = vision.get("rope_parameters") or {}
    return Gemma4TowerConfig(
        prefix="model.vision_tower",
        layers=layer_count_in(vision, "num_hidden_layers", 16),
        hidden=width,
        heads=heads,
        head_dim=count_in(vision, "head_dim", 64),
        inner=count_in(vision, "intermediate_size", 3072),
        patch=count_in(vision, "patch_size", 16),
        merge=count_in(vision, "pooling_kernel_size", 3),
        out=hidden,
        names=towers.GEMMA4,
        eps=number_in(vision, "rms_norm_eps", 1e-6),
        is_rms=True,
        bias=False,
        activation=_activation(vision, "gelu_pytorch_tanh"),
        rules=_gemma4_rules(whole, None),
        is_clipped=bool(vision.get("use_clipped_linears")),
        theta=number_in(rope, "rope_theta", 100.0),
        num_places=count_in(vision, "position_embedding_size", 10_240),
        is_standardised=bool(vision.get("standardize")),
        is_repacked=bool(vision.get("is_repacked")),
    )


@dataclass(frozen=True, slots=True)
class PatchTowerConfig(TowerConfig):
    """The unified Gemma 4: no layers. A projection of patches, and places by row and column."""

    num_places: int = 0
    is_repacked: bool = False
    """Whether the values of a patch are sorted by colour and places by their axis, as in GGUF files, instead of by
    pixel and by number."""

    def ends(self) -> Iterator[tuple[str, TowerTensor]]:
        yield from self.norm("patch_norm", f"{self.prefix}.patch_ln1", self.patch_values)
        yield from self.linear("patch", {f"{self.prefix}.patch_dense": self.hidden}, self.patch_values)
        yield from self.norm("norm", f"{self.prefix}.patch_ln2", self.hidden)
        shape = (2, self.num_places, self.hidden) if self.is_repacked else (self.num_places, 2, self.hidden)
        places = {f"{self.prefix}.pos_embedding": 2 * self.num_places}
        yield "places", TowerTensor(places, self.hidden, shape)
        yield from self.norm("out_norm", f"{self.prefix}.pos_norm", self.hidden)
        projection = "model.embed_vision.embedding_projection"
        yield from self.linear("out", {projection: self.out}, self.hidden, bias=False)


def _gemma4_unified(vision: Json, whole: Json, hidden: int) -> TowerConfig:
    return PatchTowerConfig(
        prefix="model.vision_embedder",
        layers=0,
        hidden=count_in(vision, "mm_embed_dim", 3840),
        heads=0,
        head_dim=0,
        inner=0,
        patch=count_in(vision, "patch_size", 16) * count_in(vision, "pooling_kernel_size", 3),
        merge=1,
        out=hidden,
        names=towers.GEMMA4,
        eps=1e-5,
        rules=_gemma4_rules(whole, "vision"),
        num_places=count_in(vision, "mm_posemb_size", 1120),
        is_repacked=bool(vision.get("is_repacked")),
    )


def _activation(vision: Json, default: str) -> Activation:
    name = str(vision.get("hidden_act") or vision.get("hidden_activation") or default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"the vision tower's activation {name!r} is not supported")
    return _ACTIVATIONS[name]


def _side(num_positions: int) -> int:
    try:
        return side_of(num_positions)
    except ValueError as error:
        raise UnsupportedModel(f"the vision tower has {error}") from error


TOWERS: Mapping[str, Callable[[Json, Json, int], TowerConfig]] = {
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
    "pixtral": _pixtral,
    "qwen": _qwen,
    "siglip": _siglip,
}
"""By the kind that a family names."""


def read_tower(whole: Json, hidden: int) -> TowerConfig | None:
    """The tower of a model whose residual stream is `hidden` wide; None: it has none here. Raises UnsupportedModel."""
    vision, read = whole.get("vision_config"), TOWERS.get(family_of(whole).tower)
    if read is None or not isinstance(vision, Mapping):
        return None
    return read(vision, whole, hidden)
