"""The structure of a model, read from its config: layers, sizes and options.

Imports no torch. The decoder is built from it, and its size is computed from it, so that both follow from one
description.
"""

from __future__ import annotations

import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from cortex.neuron.layers.configs import (
    KV_MIXERS,
    WHOLE,
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    PerLayerInputsConfig,
    Shard,
)
from cortex.neuron.layers.recurrent.configs import RecurrentConfig
from cortex.neuron.models.config import DecoderConfig, UnsupportedModel, count_in, routed
from cortex.neuron.models.layer import (
    BlockNorms,
    LayerConfig,
    MixerConfig,
    PredictionConfig,
    Slices,
    feed_forward_slices,
    mixer_slices,
)
from cortex.neuron.models.pooling.config import PoolingConfig
from cortex.neuron.models.towers.config import TowerConfig
from cortex.neuron.models.towers.families import read_tower
from cortex.neuron.pictures.picture import PictureRules
from cortex.neuron.weights.sharded import TensorSlice


@dataclass(frozen=True, slots=True)
class EndsConfig:
    """The parts outside of the layers: embedding, last norm and head."""

    norm: NormConfig
    """Its scale is that of the logits."""
    embedding_scale: float = 1.0
    embedding_eps: float | None = None
    """Embeddings are normalised with it, without a weight; None: they are not."""
    logit_cap: float | None = None
    """Logits x become cap · tanh(x / cap)."""
    per_layer_inputs: PerLayerInputsConfig | None = None
    norms: tuple[str, ...] = ("norm",)
    """The norms before the first and after the last layer, by name."""
    tables: Mapping[str, int] = field(default_factory=dict)
    """Embeddings besides that of tokens → their number of rows."""


def _can_pool(mixer: MixerConfig | None) -> bool:
    """Whether a mixer can be computed within whole texts, without pages."""
    if not isinstance(mixer, AttentionConfig):
        return False
    return mixer.kv == "projected" and not (mixer.sinks or mixer.norms_values or mixer.softcap)


class Architecture(ABC):
    """One model of a family. Immutable once built.

    Raises UnsupportedModel from its constructor for a config that is incomplete or needs what is not implemented.
    """

    backend: ClassVar[str] = "native"
    """The backend of its models: the layers here, or another library's."""
    has_stages: ClassVar[bool] = True
    """Whether it can be divided by layers."""
    prefix: ClassVar[str] = "model"
    """Where the checkpoint keeps the decoder's tensors."""
    mixer_norms: ClassVar[BlockNorms] = BlockNorms(before="input_layernorm")
    feed_forward_norms: ClassVar[BlockNorms] = BlockNorms(before="post_attention_layernorm")
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of options that the family's configs leave out."""
    implemented: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Options of the family's configs → their values that are implemented. The constructor rejects others."""
    notes: tuple[str, ...] = ()
    """Notes for users about every model of this family."""

    shard: Shard = WHOLE
    """The part of each layer that `layers` describes: that of one rank, or the whole layer."""
    tower: TowerConfig | None = None
    """The vision tower; None if the model reads text only."""
    stage: range | None = None
    """Which layers of the model `layers` are, where the model is divided by layers; None: all of them."""
    head: PredictionConfig | None = None
    """The prediction head, if the model is loaded with it: see `with_head`."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = {**self.defaults, **raw}
        for name, known in self.implemented.items():
            if name in self.raw and self.raw[name] not in known:
                raise UnsupportedModel(
                    f"{name} is {self.raw[name]!r}, which is not supported for {self.raw.get('model_type')}; "
                    f"supported: {', '.join(map(repr, known))}"
                )
        self.pooling = PoolingConfig.read(self.raw)
        """The pooling to a vector or a score; None for a model that generates text."""
        self.config = self.read_config()
        if self.pooling is not None:
            self.config = self._without_head(self.config, self.pooling)
        self.ends = self.read_ends()
        self.layers = tuple(self.layer(index) for index in range(self.config.num_layers))
        self.is_recurrent = any(isinstance(layer.mixer, RecurrentConfig) for layer in self.layers)
        """Whether the whole model has layers that keep a state of fixed size for every sequence."""
        can_pool = self.ends.per_layer_inputs is None and all(_can_pool(layer.mixer) for layer in self.layers)
        if self.pooling is not None and not can_pool:
            raise UnsupportedModel("embedding and rerank models with this kind of attention are not supported")
        self.windows = windows_of([layer.mixer for layer in self.layers if isinstance(layer.mixer, KV_MIXERS)])
        """The windows of the whole model's attention layers, each once: None (no window) first, then the widest. The
        layers of a window are one KV group, which shares page ids."""

    def read_config(self) -> DecoderConfig:
        """The sizes that all families share."""
        return DecoderConfig.read(self.raw)

    def _without_head(self, config: DecoderConfig, pooling: PoolingConfig) -> DecoderConfig:
        """A model that pools has a head only where logits are compared. Raises UnsupportedModel."""
        pooling.check(config.hidden)
        context_tokens = min(config.context_tokens, pooling.max_tokens or config.context_tokens)
        return replace(config, context_tokens=context_tokens, tied=config.tied or not pooling.compares_logits)

    def layer(self, index: int) -> LayerConfig:
        """One layer of the whole model."""
        mixer, feed_forward = self.mixer(index), self.feed_forward(index)
        if self.pooling is not None and self.raw.get("is_causal") is False and isinstance(mixer, AttentionConfig):
            mixer = replace(mixer, is_causal=False)  # decoders that were trained further as encoders
        return LayerConfig(
            mixer,
            feed_forward,
            self.norm,
            BlockNorms() if mixer is None else self.mixer_norms,
            BlockNorms() if feed_forward is None else self.feed_forward_norms,
        )

    def sharded(self, shard: Shard) -> Architecture:
        """One rank's share of this model: `config` describes the whole model, `layers` the share.

        Raises UnsupportedModel if the model cannot be divided in this way.
        """
        self._reject_division()
        part = copy.copy(self)
        part.shard = shard
        part.layers = tuple(layer.sharded(shard) for layer in self.layers)
        part.head = None if self.head is None else self.head.sharded(shard)
        return part

    def staged(self, stage: range) -> Architecture:
        """The stage with these layers of this whole model, which `config` describes.

        The first stage also has embedding, last norm and head: so only hidden states travel between stages, which are
        far smaller than logits, and a head that shares the memory of the embedding still does.
        """
        self._reject_division()
        part = copy.copy(self)
        part.stage = stage
        part.layers = self.layers[stage.start : stage.stop]
        part.head = self.head if part.has_ends else None
        return part

    def hosting(self, moved: Sequence[int]) -> Architecture:
        """The same model with `moved` routed experts, or the feed-forward block, of each layer in host memory."""
        part = copy.copy(self)
        part.layers = tuple(layer.hosting(count) for layer, count in zip(self.layers, moved, strict=True))
        return part

    def with_head(self, names: Container[str] | None) -> Architecture:
        """The model, or its share of a rank, with the head that predicts further tokens. `names`: the tensors of its
        checkpoint; None: they are not known. Raises UnsupportedModel if there is none."""
        head = self.read_head()
        if head is None or (names is not None and not head.is_in(names)):
            missing = "the model's family has" if head is None else "the checkpoint has"
            raise UnsupportedModel(
                f'{missing} no head that predicts further tokens, as speculation = "mtp" needs; '
                'use "lookup", a model that is published with one, or a GGUF file that was converted with it'
            )
        whole = copy.copy(self)
        whole.head = head if self.shard.is_whole else head.sharded(self.shard)
        return whole

    def _reject_division(self) -> None:
        if self.pooling is not None:
            raise UnsupportedModel("embedding and rerank models run on one device each; use replicas instead")

    def without_tower(self) -> Architecture:
        """The same model, which reads text only."""
        part = copy.copy(self)
        part.tower = None
        return part

    @property
    def pictures(self) -> PictureRules:
        """How the decoder treats pictures."""
        return PictureRules() if self.tower is None else self.tower.rules

    @property
    def held_tower(self) -> TowerConfig | None:
        """The tower, on the rank that has it: the first, which sends its vectors to the others."""
        return self.tower if self.has_ends and self.shard.is_first else None

    @property
    def is_divided(self) -> bool:
        return not self.shard.is_whole or self.stage is not None

    @property
    def output(self) -> str:
        """The tensor of the output matrix."""
        return f"{self.prefix}.embed_tokens.weight" if self.config.tied else "lm_head.weight"

    @property
    def has_ends(self) -> bool:
        """Whether this part has the embedding, the last norm and the head."""
        return self.stage is None or self.stage.start == 0

    def named_layers(self) -> Iterator[tuple[str, LayerConfig]]:
        """The layers of this part, by the prefix of their tensors in the checkpoint."""
        first = 0 if self.stage is None else self.stage.start
        for index, layer in enumerate(self.layers, first):
            yield f"{self.prefix}.layers.{index}", layer

    def tensor_slices(self, shard: Shard) -> Slices:
        """The parts of this whole model's tensors that a rank reads."""
        slices: dict[str, TensorSlice | None] = {}
        for name in (f"{self.prefix}.embed_tokens.weight", "lm_head.weight"):
            slices[name] = TensorSlice(rows=(shard.part(self.config.vocab),))
        if (inputs := self.ends.per_layer_inputs) is not None:
            slices[f"{self.prefix}.embed_tokens_per_layer.weight"] = TensorSlice(rows=(shard.part(inputs.vocab),))
        for name, layer in (*self.named_layers(), *(() if self.head is None else self.head.named_layers())):
            if layer.mixer is not None:
                slices.update(mixer_slices(layer.mixer, shard, name))
            for block in (layer.feed_forward, layer.experts):
                slices.update(feed_forward_slices(block, shard, name) if block is not None else ())
        return slices

    @property
    def norm(self) -> NormConfig:
        """The norms over the residual stream."""
        return NormConfig(self.config.norm_eps)

    @property
    def num_unread_layers(self) -> int:
        """Layers that a checkpoint may have after those that its config counts: they predict further tokens."""
        return 0

    def check_layer_count(self, names: Iterable[str]) -> None:
        """Raises UnsupportedModel for tensors of layers beyond the config's count, without which the model would
        respond wrongly. A layer without tensors is noticed when tensors are read."""
        layer = re.compile(re.escape(f"{self.prefix}.layers.") + r"(\d{1,9})\.")
        num_layers = max((int(match[1]) + 1 for name in names if (match := layer.match(name))), default=0)
        if num_layers > self.config.num_layers + self.num_unread_layers:
            raise UnsupportedModel(
                f"the checkpoint has {num_layers} layers, its config {self.config.num_layers}; "
                "is this the config of these weights?"
            )

    def read_head(self) -> PredictionConfig | None:
        """The head that predicts further tokens, where the family's checkpoints have one."""
        return None

    def read_ends(self) -> EndsConfig:
        """The options of embedding, last norm and head."""
        return EndsConfig(self.norm)

    def mixture(
        self, inner: str, experts: str, renormalise: bool, *, top_k: str = "num_experts_per_tok", **options: Any
    ) -> MoEConfig:
        """Routed experts, whose sizes the config has under these names. Raises UnsupportedModel for sizes that
        contradict each other."""
        return routed(
            self.config.hidden,
            count_in(self.raw, inner),
            count_in(self.raw, experts),
            count_in(self.raw, top_k),
            renormalise,
            **options,
        )

    @abstractmethod
    def mixer(self, index: int) -> MixerConfig | None:
        """The first half of a layer; None: it has none."""

    @abstractmethod
    def feed_forward(self, index: int) -> MLPConfig | MoEConfig | None:
        """The second half of a layer; None: it has none."""


def windows_of(attentions: Iterable[AttentionConfig | LatentAttentionConfig]) -> tuple[int | None, ...]:
    """The windows of attention layers, each once: None (no window) first, then the widest."""
    found = {attention.window for attention in attentions} or {None}
    return tuple(sorted(found, key=lambda window: window or math.inf, reverse=True))


TEXT_ONLY = "text only: the vision tower is not loaded"


class TextPart(Architecture):
    """Goes before the family of the language model among the bases of a class. Its config is one level down."""

    prefix = "model.language_model"

    def __init__(self, raw: Mapping[str, Any]) -> None:
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise UnsupportedModel(f"the config of this {raw['model_type']} model has no 'text_config'")
        whole = {"model_type": raw["model_type"]}
        if "tie_word_embeddings" in raw:
            whole["tie_word_embeddings"] = raw["tie_word_embeddings"]
        super().__init__({**text, **whole})
        self.tower = read_tower(raw, self.config.hidden)
        if self.tower is None:
            self.notes = (TEXT_ONLY,)

    def without_tower(self) -> Architecture:
        part = super().without_tower()
        part.notes = (TEXT_ONLY,)
        return part


Architectures = Mapping[str, Callable[[Mapping[str, Any]], Architecture]]
"""`model_type` in a model's config → the architecture that reads the config."""
