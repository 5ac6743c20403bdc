"""How a model is divided among the ranks of a group (tensor parallelism): the sizes of a rank's layers, and the part of
each tensor of the checkpoint that fills them.

Attention and recurrent layers are divided by head or channel, feed-forward blocks by inner width, mixtures by expert,
embedding and head by token. Norms and routers are on every rank. Ranks share a key-value head, or a group of heads,
where there are fewer than ranks; the latents of latent attention are on every rank. Imports no torch: a node checks
with it whether a model can be divided.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cortex.neuron.layers.configs import (
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    PerLayerInputConfig,
    Shard,
)
from cortex.neuron.layers.recurrent.configs import Band, RecurrentConfig
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.weights.sharded import TensorSlice

MixerConfig = AttentionConfig | LatentAttentionConfig | RecurrentConfig
Slices = Mapping[str, TensorSlice | None]
"""Name of a tensor as the rank sees it → the part that the rank reads; None: nothing. Tensors left out are whole."""


def sharded_mixer(mixer: MixerConfig, shard: Shard) -> MixerConfig:
    """One rank's share of a mixer. Raises UnsupportedModel."""
    if isinstance(mixer, RecurrentConfig):
        return _sharded_recurrent(mixer, shard)
    heads = _divide(mixer.heads, shard, f"{mixer.heads} attention heads")
    if isinstance(mixer, LatentAttentionConfig):
        return replace(mixer, heads=heads, output_bias=mixer.output_bias and shard.is_first)
    return replace(
        mixer, heads=heads, kv_heads=len(_kv_heads(mixer, shard)), output_bias=mixer.output_bias and shard.is_first
    )


def sharded_feed_forward(block: MLPConfig | MoEConfig, shard: Shard) -> MLPConfig | MoEConfig:
    """One rank's share of a feed-forward block. Raises UnsupportedModel."""
    if isinstance(block, MoEConfig):
        return sharded_experts(block, shard)
    inner = _divide(block.inner, shard, f"an inner width of {block.inner}")
    return replace(block, inner=inner, output_bias=block.output_bias and shard.is_first)


def sharded_experts(experts: MoEConfig, shard: Shard) -> MoEConfig:
    """One rank's share of a mixture. Raises UnsupportedModel."""
    if experts.experts < shard.size:
        raise UnsupportedModel(f"{experts.experts} experts cannot be divided among {shard.size} devices; use fewer")
    shared_inner = _divide(experts.shared_inner, shard, f"a shared expert of width {experts.shared_inner}")
    return replace(experts, shared_inner=shared_inner, shard=shard)


def mixer_slices(mixer: MixerConfig, shard: Shard, prefix: str) -> Iterator[tuple[str, TensorSlice]]:
    """The parts of a whole mixer's tensors. `prefix`: of the layer."""
    if isinstance(mixer, AttentionConfig):
        yield from _attention_slices(mixer, shard, f"{prefix}.self_attn")
    elif isinstance(mixer, LatentAttentionConfig):
        yield from _latent_slices(mixer, shard, f"{prefix}.self_attn")
    else:
        yield from _recurrent_slices(mixer, shard, f"{prefix}.{mixer.block}")


def feed_forward_slices(
    block: MLPConfig | MoEConfig, shard: Shard, prefix: str
) -> Iterator[tuple[str, TensorSlice | None]]:
    """The parts of a whole feed-forward block's tensors. `prefix`: of the layer."""
    if isinstance(block, MLPConfig):
        yield from _gated_mlp_slices(f"{prefix}.mlp", shard.part(block.inner))
        return
    if block.shared_inner:
        yield from _gated_mlp_slices(f"{prefix}.mlp.shared_expert", shard.part(block.shared_inner))
    held = shard.part(block.experts)
    experts = f"{prefix}.mlp.experts"
    yield f"{experts}.gate_up_proj", TensorSlice(rows=(held,))
    yield f"{experts}.up_proj", TensorSlice(rows=(held,))
    yield f"{experts}.down_proj", TensorSlice(rows=(held,))
    yield f"{experts}.gate_up_proj.bias", TensorSlice(rows=(_scaled(held, 2 * block.inner),))
    for part in ("gate_proj", "up_proj", "down_proj"):
        yield f"{experts}.{part}.bias", TensorSlice(rows=(held,))
    for number in range(block.experts):  # the experts of a rank have ids from 0
        for part in ("gate", "up", "gate_up", "down"):
            name = f"{experts}.{number}.{part}_proj.weight"
            source = f"{experts}.{held.start + number}.{part}_proj.weight"
            yield name, TensorSlice(source=source) if number < len(held) else None


def _attention_slices(config: AttentionConfig, shard: Shard, prefix: str) -> Iterator[tuple[str, TensorSlice]]:
    heads, kv_heads = shard.part(config.heads), _kv_heads(config, shard)
    q_rows = _scaled(heads, config.head_dim * (2 if config.gated else 1))
    kv_rows = _scaled(kv_heads, config.head_dim)
    for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
        yield f"{prefix}.{name}.weight", TensorSlice(rows=(rows,))
        yield f"{prefix}.{name}.bias", TensorSlice(rows=(rows,))
    if config.qk_norm is not None and config.qk_norm.spans_heads:
        yield f"{prefix}.q_norm.weight", TensorSlice(rows=(_scaled(heads, config.head_dim),))
        yield f"{prefix}.k_norm.weight", TensorSlice(rows=(kv_rows,))
    for name, num_rows in config.gate_rows(prefix).items():
        yield f"{name}.weight", TensorSlice(rows=(shard.part(num_rows),))
    yield f"{prefix}.o_proj.weight", TensorSlice(columns=_scaled(heads, config.head_dim))
    yield f"{prefix}.sinks", TensorSlice(rows=(heads,))


def _latent_slices(config: LatentAttentionConfig, shard: Shard, prefix: str) -> Iterator[tuple[str, TensorSlice]]:
    heads = shard.part(config.heads)
    for name in ("q_proj", "q_b_proj"):
        yield f"{prefix}.{name}.weight", TensorSlice(rows=(_scaled(heads, config.query_dim),))
    rows = _scaled(heads, config.plain_dims + config.value_dim)
    yield f"{prefix}.kv_b_proj.weight", TensorSlice(rows=(rows,))
    for name in ("k_b_proj", "v_b_proj"):  # by head
        yield f"{prefix}.{name}.weight", TensorSlice(rows=(heads,))
    yield f"{prefix}.o_proj.weight", TensorSlice(columns=_scaled(heads, config.value_dim))


def _sharded_recurrent(config: RecurrentConfig, shard: Shard) -> RecurrentConfig:
    changes: dict[str, Any] = {}
    for field, what in config.divided.items():
        count: int = getattr(config, field)
        is_shared = field in config.shared and shard.size % count == 0
        changes[field] = 1 if is_shared else _divide(count, shard, f"{count} {what}")
    return replace(config, **changes)


def _recurrent_slices(config: RecurrentConfig, shard: Shard, prefix: str) -> Iterator[tuple[str, TensorSlice]]:
    for tensor in config.tensors:
        rows, first = [], 0
        for band in tensor.bands:
            rows.append(_shifted(_scaled(_units(band, shard), band.size), first))
            first += band.num_rows
        if tensor.role == "output":
            yield f"{prefix}.{tensor.name}", TensorSlice(columns=rows[0])
        elif rows:
            yield f"{prefix}.{tensor.name}", TensorSlice(rows=tuple(rows))


def _units(band: Band, shard: Shard) -> range:
    """The units of a rank. Ranks share one where there are fewer units than ranks."""
    start = shard.rank * band.count // shard.size
    return range(start, start + max(1, band.count // shard.size))


def _gated_mlp_slices(prefix: str, inner: range) -> Iterator[tuple[str, TensorSlice]]:
    for name in ("gate_proj", "up_proj"):
        yield f"{prefix}.{name}.weight", TensorSlice(rows=(inner,))
        yield f"{prefix}.{name}.bias", TensorSlice(rows=(inner,))
    yield f"{prefix}.down_proj.weight", TensorSlice(columns=inner)


def _kv_heads(config: AttentionConfig, shard: Shard) -> range:
    """The key-value heads of this rank's attention heads. Raises UnsupportedModel."""
    if config.kv_heads % shard.size and shard.size % config.kv_heads:
        raise UnsupportedModel(
            f"{config.kv_heads} key-value heads cannot be divided among {shard.size} devices; "
            "choose a number of devices that divides them, or a multiple of them"
        )
    start = shard.rank * config.kv_heads // shard.size
    return range(start, start + max(1, config.kv_heads // shard.size))


def _divide(count: int, shard: Shard, what: str) -> int:
    if count % shard.size:
        raise UnsupportedModel(
            f"{what} cannot be divided among {shard.size} devices; choose a number of devices that divides {count}"
        )
    return count // shard.size


def _scaled(span: range, factor: int) -> range:
    return range(span.start * factor, span.stop * factor)


def _shifted(span: range, distance: int) -> range:
    return range(span.start + distance, span.stop + distance)


@dataclass(frozen=True, slots=True)
class BlockNorms:
    """The norms of a block, by their names in the layer; None: there is none. The norm after a block is applied before
    the addition to the residual stream."""

    before: str | None = None
    after: str | None = None
    after_eps: float | None = None
    """The norm after the block has it; None: it has that of the layer's norms."""

    @property
    def names(self) -> list[str]:
        return [name for name in (self.before, self.after) if name is not None]


EXPERT_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
"""The norms of a layer with experts parallel to its feed-forward block: after the block, before the experts, after."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """A mixer over the tokens of a sequence, then a feed-forward block for each token. One of them may be missing."""

    mixer: MixerConfig | None
    feed_forward: MLPConfig | MoEConfig | None
    norm: NormConfig
    """It applies to all norms of the layer over the residual stream."""
    mixer_norms: BlockNorms
    feed_forward_norms: BlockNorms
    """None of its own: the feed-forward block has the same input as the mixer, and both are added."""
    experts: MoEConfig | None = None
    """Experts parallel to the feed-forward block, with norms of their own: `EXPERT_NORMS`."""
    per_layer_input: PerLayerInputConfig | None = None
    """What follows the feed-forward block, in models whose layers have inputs of their own."""
    has_factor: bool = False
    """Whether the residual stream after the layer is multiplied by a number of the checkpoint, `layer_scalar`."""

    def sharded(self, shard: Shard) -> LayerConfig:
        mixer = None if self.mixer is None else sharded_mixer(self.mixer, shard)
        block = None if self.feed_forward is None else sharded_feed_forward(self.feed_forward, shard)
        experts = None if self.experts is None else sharded_experts(self.experts, shard)
        return replace(self, mixer=mixer, feed_forward=block, experts=experts)

    def hosting(self, moved: int) -> LayerConfig:
        """The layer with `moved` of its routed experts in host memory; without experts, its feed-forward block."""
        if self.experts is not None:
            return replace(self, experts=replace(self.experts, hosted=moved))
        if isinstance(self.feed_forward, MoEConfig):
            return replace(self, feed_forward=replace(self.feed_forward, hosted=moved))
        if self.feed_forward is None:
            return self
        return replace(self, feed_forward=replace(self.feed_forward, is_hosted=moved > 0))

    @property
    def mixture(self) -> MoEConfig | None:
        """Its routed experts."""
        return self.feed_forward if isinstance(self.feed_forward, MoEConfig) else self.experts

    @property
    def is_parallel(self) -> bool:
        return self.feed_forward is not None and not self.feed_forward_norms.names


@dataclass(frozen=True, slots=True)
class PredictionConfig:
    layer: LayerConfig
    norm: NormConfig
    layer_name: str
    """The prefix of the layer's tensors in the checkpoint, as all names below are."""
    projection: str
    """From embedding and hidden state, in this order, to the input of the layer."""
    embedding_norm: str
    hidden_norm: str
    last_norm: str
    carries_norm: bool = True
    """Whether the hidden state that the next prediction starts from is the one after the last norm."""

    def sharded(self, shard: Shard) -> PredictionConfig:
        return replace(self, layer=self.layer.sharded(shard))

    @property
    def norms(self) -> tuple[str, ...]:
        return self.embedding_norm, self.hidden_norm, self.last_norm

    def is_in(self, names: Container[str]) -> bool:
        """Whether a checkpoint with tensors of these names has the head."""
        return f"{self.projection}.weight" in names

    def named_layers(self) -> Iterator[tuple[str, LayerConfig]]:
        yield self.layer_name, self.layer


def of_mtp(layer: LayerConfig, norm: NormConfig) -> PredictionConfig:
    """The head as Qwen publishes it, next to the model."""
    return PredictionConfig(
        layer,
        norm,
        layer_name="mtp.layers.0",
        projection="mtp.fc",
        embedding_norm="mtp.pre_fc_norm_embedding",
        hidden_norm="mtp.pre_fc_norm_hidden",
        last_norm="mtp.norm",
    )
