"""The model that every family's architecture is built into: embeddings, a stack of layers, a last norm, a head."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.attention import Attention
from cortex.neuron.layers.configs import AttentionConfig, MLPConfig
from cortex.neuron.layers.embedding import Embedding, Head
from cortex.neuron.layers.gated_delta import GatedDelta
from cortex.neuron.layers.mlp import MLP
from cortex.neuron.layers.moe import MoE
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.rope import RopeTable
from cortex.neuron.models.architecture import Architecture, LayerConfig


class DecoderLayer:
    """A mixer (attention or a gated delta net) and a feed-forward block, each after a norm and added to its input."""

    def __init__(self, model: Decoder, layer: LayerConfig, prefix: str) -> None:
        parameters, mixer, feed_forward = model.parameters, layer.mixer, layer.feed_forward
        self.mixer_norm = model.new_norm(f"{prefix}.input_layernorm.weight")
        self.mixer: Attention | GatedDelta
        if isinstance(mixer, AttentionConfig):
            self.mixer = Attention(parameters, mixer, model.rope, f"{prefix}.self_attn")
        else:
            self.mixer = GatedDelta(parameters, mixer, f"{prefix}.linear_attn")
        self.mlp_norm = model.new_norm(f"{prefix}.post_attention_layernorm.weight")
        self.mlp: MLP | MoE
        if isinstance(feed_forward, MLPConfig):
            self.mlp = MLP(parameters, feed_forward, f"{prefix}.mlp")
        else:
            self.mlp = MoE(parameters, feed_forward, f"{prefix}.mlp")

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        """hidden: [tokens, hidden] → [tokens, hidden], the residual stream before and after this layer."""
        hidden = self.mixer(hidden, self.mixer_norm, batch)
        return self.mlp(hidden, self.mlp_norm)


class Decoder:
    """A model as the engine sees it, or one stage of it. `embedding`, `norm` and `head` exist where the architecture
    `has_ends`."""

    embedding: Embedding
    norm: RMSNorm
    head: Head

    def __init__(self, architecture: Architecture, parameters: Parameters, num_positions: int) -> None:
        """`num_positions`: the longest sequence this instance will see."""
        self.architecture = architecture
        self.config = architecture.config
        self.parameters = parameters
        config, prefix = self.config, architecture.prefix
        self.rope = RopeTable(config.rope, num_positions, parameters.device)
        if architecture.has_ends:
            self.embedding = Embedding(parameters, config.vocab, config.hidden, f"{prefix}.embed_tokens.weight")
        self.layers = [DecoderLayer(self, layer, name) for name, layer in architecture.named_layers()]
        if architecture.has_ends:
            tied = self.embedding if config.tied else None
            self.norm = self.new_norm(f"{prefix}.norm.weight")
            self.head = Head(parameters, config.vocab, config.hidden, "lm_head", tied)

    def new_norm(self, source: str) -> RMSNorm:
        """Allocates a norm over the residual stream."""
        config, zero_centred = self.config, self.architecture.zero_centred_norm
        return RMSNorm(self.parameters, config.hidden, config.norm_eps, source, zero_centred=zero_centred)

    @property
    def attentions(self) -> list[Attention]:
        """The layers' attentions, which keep KV, in order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]

    @property
    def gated_deltas(self) -> list[GatedDelta]:
        """The layers' gated delta nets, which keep a state of fixed size for every row, in order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDelta)]

    def storages(self) -> list[torch.UntypedStorage]:
        """The device memory that the model holds for as long as it is loaded: weights and tables, each piece once."""
        return [*self.parameters.storages(), self.rope.table.untyped_storage()]

    def __call__(self, batch: Batch) -> Tensor:
        """The residual stream after the last layer of this part, which has the embedding: [tokens, hidden]"""
        return self.through_layers(self.embedding(batch.tokens), batch)

    def through_layers(self, hidden: Tensor, batch: Batch) -> Tensor:
        """hidden: [tokens, hidden] → [tokens, hidden], the residual stream before and after the layers."""
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] → [rows, vocab]"""
        return self.head.logits(hidden, self.norm)
