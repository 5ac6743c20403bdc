"""Qwen3-Next and Qwen3.5: most layers are gated delta nets, every few one is gated attention; dense or with experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.attention import Attention, AttentionConfig
from cortex.neuron.layers.gated_delta import GatedDelta, GatedDeltaConfig, by_key_head
from cortex.neuron.layers.mlp import MLP
from cortex.neuron.layers.moe import MoE
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.qwen3_moe import is_sparse, read_moe

DEFAULTS: Mapping[str, Any] = {"partial_rotary_factor": 0.25, "norm_topk_prob": True}
"""What these families mean where their configs say nothing."""


class Qwen3NextLayer:
    """A mixer (attention or gated delta net) and a feed-forward block, each after a norm and added to its input."""

    def __init__(self, model: Qwen3Next, index: int, prefix: str) -> None:
        parameters, config = model.parameters, model.config

        def norm(name: str) -> RMSNorm:
            return RMSNorm(parameters, config.hidden, config.norm_eps, f"{prefix}.{name}.weight", zero_centred=True)

        self.mixer_norm = norm("input_layernorm")
        self.mixer: Attention | GatedDelta
        if model.layer_types[index] == "full_attention":
            self.mixer = Attention(parameters, model.attention_config(), model.rope, f"{prefix}.self_attn")
        else:
            self.mixer = model.gated_delta(f"{prefix}.linear_attn")
        self.mlp_norm = norm("post_attention_layernorm")
        self.mlp: MLP | MoE
        if is_sparse(model.raw, index):
            self.mlp = MoE(parameters, read_moe(model.raw, config.hidden), f"{prefix}.mlp")
        else:
            self.mlp = MLP(parameters, config.hidden, config.inner, f"{prefix}.mlp")

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        hidden = self.mixer(hidden, self.mixer_norm, batch)
        return self.mlp(hidden, self.mlp_norm)


class Qwen3Next(Decoder):
    """Projections of the delta nets are stored key head by key head."""

    zero_centred_norm = True
    layers: list[Qwen3NextLayer]

    def __init__(self, raw: Mapping[str, Any], parameters: Parameters, num_positions: int) -> None:
        raw = {**DEFAULTS, **raw}
        self.layer_types = _layer_types(raw)
        super().__init__(raw, parameters, num_positions)

    def layer(self, index: int, prefix: str) -> Qwen3NextLayer:
        return Qwen3NextLayer(self, index, prefix)

    def attention_config(self) -> AttentionConfig:
        config = self.config
        bias = bool(self.raw.get("attention_bias", False))
        return AttentionConfig(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            norm_eps=config.norm_eps,
            bias=bias,
            output_bias=bias,
            qk_norm=True,
            zero_centred_norm=True,
            gated=True,
        )

    def gated_delta(self, prefix: str) -> GatedDelta:
        config = self.gated_delta_config()
        return GatedDelta(self.parameters, config, prefix, *self.delta_inputs(config, prefix))

    def gated_delta_config(self) -> GatedDeltaConfig:
        raw = self.raw
        try:
            return GatedDeltaConfig(
                hidden=self.config.hidden,
                key_heads=int(raw["linear_num_key_heads"]),
                value_heads=int(raw["linear_num_value_heads"]),
                key_dim=int(raw["linear_key_head_dim"]),
                value_dim=int(raw["linear_value_head_dim"]),
                conv_taps=int(raw["linear_conv_kernel_dim"]),
                norm_eps=self.config.norm_eps,
            )
        except KeyError as missing:
            raise UnsupportedModel(f"the model's config has no {missing.args[0]!r}") from None

    def delta_inputs(
        self, config: GatedDeltaConfig, prefix: str
    ) -> tuple[dict[str, int], dict[str, Callable[[Tensor], Tensor]]]:
        """The input projections of a delta net as the checkpoint has them, and how to order their rows."""
        shared = config.value_heads // config.key_heads
        values = shared * config.value_dim
        mixed, gates = f"{prefix}.in_proj_qkvz", f"{prefix}.in_proj_ba"
        rows = {mixed: 2 * config.key_size + 2 * config.value_size, gates: 2 * config.value_heads}
        return rows, {
            mixed: by_key_head(config.key_heads, (config.key_dim, config.key_dim, values, values)),
            gates: by_key_head(config.key_heads, (shared, shared)),
        }

    @property
    def attentions(self) -> list[Attention]:
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]

    @property
    def gated_deltas(self) -> list[GatedDelta]:
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDelta)]


class Qwen35(Qwen3Next):
    """Qwen3.5, text only: the delta nets' projections are stored part by part."""

    def delta_inputs(
        self, config: GatedDeltaConfig, prefix: str
    ) -> tuple[dict[str, int], dict[str, Callable[[Tensor], Tensor]]]:
        return {
            f"{prefix}.in_proj_qkv": 2 * config.key_size + config.value_size,
            f"{prefix}.in_proj_z": config.value_size,
            f"{prefix}.in_proj_b": config.value_heads,
            f"{prefix}.in_proj_a": config.value_heads,
        }, {}


class Qwen35Multimodal(Qwen35):
    """Qwen3.5 as published: the language model beside a vision tower, which is not loaded.

    In text the three position axes of its rotation are equal, so it is the plain one.
    """

    prefix = "model.language_model"

    def __init__(self, raw: Mapping[str, Any], parameters: Parameters, num_positions: int) -> None:
        text = raw.get("text_config")
        if not isinstance(text, Mapping):
            raise UnsupportedModel(f"the config of this {raw['model_type']} model has no 'text_config'")
        tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        text = {**text, "model_type": raw["model_type"], "tie_word_embeddings": tied}
        super().__init__(text, parameters, num_positions)
        self.notes = ("text only: the vision tower is not loaded",)


def _layer_types(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The kind of every layer, listed by the config or given by an interval. Raises UnsupportedModel."""
    num_layers = int(raw.get("num_hidden_layers", 0))
    interval = int(raw.get("full_attention_interval") or 4)
    regular = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)]
    kinds = tuple(raw.get("layer_types") or regular)
    unknown = set(kinds) - {"linear_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        raise UnsupportedModel(f"layer_types must name {num_layers} linear_attention or full_attention layers: {kinds}")
    return kinds
