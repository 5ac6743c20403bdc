"""The sizes of a model that the `transformers` library runs. Imports neither torch nor the library."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.layers.configs import AttentionConfig, Shard
from cortex.neuron.models.architecture import Architecture, windows_of
from cortex.neuron.models.config import UnsupportedModel, count_in, layer_type_in
from cortex.neuron.models.layer import Slices
from cortex.neuron.models.transformers.library import LibraryModel, library_model
from cortex.neuron.private_api.transformers import library_version
from cortex.neuron.weights.sharded import TensorSlice

_SIZES: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")
_ROPE_SETTINGS: Final = ("rope_scaling", "rope_parameters")
_DIVIDED: Final = ("colwise", "rowwise")
_ATTENTION: Final = re.compile(r"att(n|ention)")
_EXPERTS: Final = re.compile(r"\.experts(\.|$)")
_DENSE: Final = re.compile(r"\.experts\.|router\.|\.gate\.weight$|emb(?!ed_out)|\bwpe\b|\bwte\b|norm")
"""Matrices that are dense in any case: the library multiplies by them itself, or looks up rows."""


class TransformersArchitecture(Architecture):
    """The config's facts, which suffice to size and place the model. A worker learns each layer's attention from the
    library's modules (`with_attentions`), because configs may leave windows to the library."""

    backend: ClassVar[str] = "transformers"
    has_stages: ClassVar[bool] = False

    def __init__(self, raw: Mapping[str, Any]) -> None:
        model_type = str(raw["model_type"])
        if isinstance(raw.get("text_config"), Mapping):
            raise UnsupportedModel(
                f"{model_type} models have a language model among other parts ('text_config'), which is only supported "
                "in native families"
            )
        _check_rope(raw)
        _check_layer_types(raw)
        self.library: LibraryModel = library_model(model_type)
        sizes = {name: self.library.option(raw, name) for name in (*_SIZES, "sliding_window", "tie_word_embeddings")}
        sizes |= {"num_key_value_heads": _num_kv_heads(self.library, raw), "head_dim": _head_dim(self.library, raw)}
        super().__init__({**sizes, "model_type": model_type, "layer_types": raw.get("layer_types")})
        self.raw = dict(raw)
        self.notes = (f"run by transformers {library_version()} ({self.library.class_name})",)

    def mixer(self, index: int) -> AttentionConfig:
        config, raw = self.config, self.raw
        kind = layer_type_in(raw, index, _LAYER_TYPES, "full_attention")
        return AttentionConfig(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            rope=None,
            window=count_in(raw, "sliding_window") if kind == "sliding_attention" else None,
        )

    def feed_forward(self, index: int) -> None:
        """The library's modules have it."""

    def with_attentions(self, attentions: Sequence[AttentionConfig]) -> TransformersArchitecture:
        """The same model with the attention of each layer as its module computes it."""
        part = copy.copy(self)
        part.layers = tuple(replace(self.layers[0], mixer=attention) for attention in attentions)
        part.windows = windows_of(attentions)
        first = attentions[0]
        part.config = replace(self.config, heads=first.heads, kv_heads=first.kv_heads, head_dim=first.head_dim)
        return part

    def sharded(self, shard: Shard) -> TransformersArchitecture:
        if not self.divided:
            raise UnsupportedModel(
                f"the transformers library has no plan to divide the linear layers of {self.library.class_name} among "
                "devices; use one device"
            )
        part = copy.copy(self)
        part.shard = shard
        if any(style == "colwise" and _ATTENTION.search(name) for name, style in self.divided.items()):
            if self.config.kv_heads % shard.size:
                raise UnsupportedModel(
                    f"{self.config.kv_heads} key-value heads cannot be divided among {shard.size} devices; "
                    "choose a number of devices that divides them"
                )
            part.layers = tuple(layer.sharded(shard) for layer in self.layers)
        return part

    def staged(self, stage: range) -> TransformersArchitecture:
        raise UnsupportedModel(
            f"layers {stage.start} to {stage.stop - 1} cannot be on a device of their own, because the transformers "
            "library runs this model; use tensor_parallel, or one device"
        )

    @property
    def divided(self) -> dict[str, str]:
        """The linear layers that are divided among devices, by patterns of their names in the model: `colwise`, by
        their outputs, or `rowwise`, by their inputs, whose results are added. All others are whole on every rank."""
        return {
            f"{self.library.base_prefix}.{pattern}": style
            for pattern, style in self.library.tp_plan.items()
            if style in _DIVIDED and not _EXPERTS.search(pattern)
        }

    def division(self, name: str) -> str | None:
        """How a linear layer (its name in the model) is divided; None: it is whole on every rank."""
        for pattern, style in self.divided.items():
            if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
                return style
        return None

    def tensor_slices(self, shard: Shard) -> Slices:
        """The slices of the linear layers that are divided."""
        share = (shard.rank, shard.size)
        slices: dict[str, TensorSlice | None] = {}
        for pattern, style in self.divided.items():
            for index in range(self.config.num_layers):
                name = pattern.replace("*", str(index), 1)
                if style == "colwise":
                    slices[f"{name}.weight"] = slices[f"{name}.bias"] = TensorSlice(row_share=share)
                else:
                    slices[f"{name}.weight"] = TensorSlice(column_share=share)
        return slices

    def check_layer_count(self, names: Iterable[str]) -> None:
        """Not from names, which each model of the library has of its own: a load rejects tensors without a place."""

    def packing_of(self, packing: Mapping[str, MatrixLayout]) -> dict[str, MatrixLayout]:
        """The matrices that stay quantised: those of linear layers, which are replaced in the library's modules."""
        if self.library.has_transposed_linears:
            return {}
        return {name: layout for name, layout in packing.items() if not _DENSE.search(name)}

    def is_held(self, name: str) -> bool:
        """Whether the model has memory for a tensor of the checkpoint."""
        if self.config.tied and name in self.library.tied:
            return False
        unread = (r"rotary_emb\.inv_freq", *self.library.unread)
        return not any(re.search(rf"(^|\.){pattern}$", name) for pattern in unread)


def _num_kv_heads(library: LibraryModel, raw: Mapping[str, Any]) -> Any:
    return 1 if library.option(raw, "multi_query") else library.option(raw, "num_key_value_heads")


def _head_dim(library: LibraryModel, raw: Mapping[str, Any]) -> Any:
    """That of keys or of values, whichever is larger; None: the hidden size divided among the heads."""
    latent = [library.option(raw, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if all(isinstance(dim, int) for dim in latent):
        return max(sum(latent), library.option(raw, "v_head_dim") or 0)
    return library.option(raw, "head_dim")


def _check_layer_types(raw: Mapping[str, Any]) -> None:
    types = raw.get("layer_types")
    others = sorted({str(kind) for kind in types} - set(_LAYER_TYPES)) if isinstance(types, Sequence) else []
    if others:
        raise UnsupportedModel(
            f"layers of the type {', '.join(others):.200} are not supported in models that transformers runs; "
            f"supported are {', '.join(_LAYER_TYPES)}"
        )


def _check_rope(raw: Mapping[str, Any]) -> None:
    """Rejects rotations that depend on how long a sequence is: its keys in the cache would have to be rotated again."""
    for name in _ROPE_SETTINGS:
        settings = raw.get(name)
        parts = [settings, *settings.values()] if isinstance(settings, Mapping) else []
        for part in parts:
            kind = (part.get("rope_type") or part.get("type")) if isinstance(part, Mapping) else None
            if kind in ("dynamic", "longrope"):
                raise UnsupportedModel(f"rope scaling {kind!r} is not supported in models that transformers runs")
