"""The towers of each family, read from the whole model's config. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cortex.neuron.models.config import count_in
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.towers.config import Activation, LayerNames, TowerConfig, TowerTensor, side_of
from cortex.neuron.vision.picture import PictureRules

Json = Mapping[str, Any]

_ACTIVATIONS: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}
_QWEN_LAYER = LayerNames("norm1", ("attn.qkv",), "attn.proj", "norm2", ("mlp.linear_fc1",), "mlp.linear_fc2")


@dataclass(frozen=True, slots=True)
class QwenTowerConfig(TowerConfig):
    """Qwen3-VL and Qwen3.5."""

    table_side: int = 0
    """Of the table of places, which is stretched over each picture."""
    frames: int = 2

    def ends(self) -> Iterator[tuple[str, TowerTensor]]:
        shape = (self.hidden, 3, self.frames, self.patch, self.patch)
        name = f"{self.prefix}.patch_embed.proj"
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
        layers=count_in(vision, "depth", 27),
        hidden=width,
        heads=heads,
        head_dim=width // heads,
        inner=count_in(vision, "intermediate_size", 4304),
        patch=count_in(vision, "patch_size", 16),
        merge=count_in(vision, "spatial_merge_size", 2),
        out=out,
        names=_QWEN_LAYER,
        layer_path="model.visual.blocks.{}",
        activation=_activation(vision, "gelu_pytorch_tanh"),
        deep_layers=tuple(vision.get("deepstack_visual_indexes") or ()),
        rules=PictureRules(has_axes=True),
        table_side=_side(count_in(vision, "num_position_embeddings", 2304)),
        frames=count_in(vision, "temporal_patch_size", 2),
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
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
}
"""By the `model_type` of the whole model."""


def read_tower(whole: Json, hidden: int) -> TowerConfig | None:
    """The tower of a model whose residual stream is `hidden` wide; None: it has none here. Raises UnsupportedModel."""
    vision, read = whole.get("vision_config"), TOWERS.get(str(whole.get("model_type")))
    if read is None or not isinstance(vision, Mapping):
        return None
    return read(vision, whole, hidden)
