"""The model that every family's architecture is built into: embeddings, a stack of layers, a last norm, a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.attention import Attention, CachedAttention, LatentAttention
from cortex.neuron.layers.configs import AttentionConfig, LatentAttentionConfig, MLPConfig, NormConfig
from cortex.neuron.layers.embedding import Embedding, Head
from cortex.neuron.layers.feed_forward import MLP, HostedMLP, PerLayerInput, PerLayerInputs
from cortex.neuron.layers.moe import MoE, ParallelExperts
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.recurrent.configs import GatedDeltaConfig, MambaConfig, RecurrentConfig, ShortConvConfig
from cortex.neuron.layers.recurrent.layers import GatedDelta, Mamba, RecurrentLayer, ShortConv
from cortex.neuron.layers.rope import RopeTables
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.layer import EXPERT_NORMS, LayerConfig
from cortex.neuron.models.packing import draft_output
from cortex.neuron.models.proposer import PredictionHead
from cortex.neuron.models.towers.tower import Tower

RECURRENT_LAYERS: Mapping[type[RecurrentConfig], Callable[[Parameters, Any, str], RecurrentLayer]] = {
    GatedDeltaConfig: GatedDelta,
    MambaConfig: Mamba,
    ShortConvConfig: ShortConv,
}
"""The layer that each config of a recurrent layer describes."""


class DecoderLayer:
    """A mixer (attention, plain or latent, or a recurrent layer) and a feed-forward block, each added to its input, or
    one of them."""

    def __init__(self, model: Decoder, layer: LayerConfig, prefix: str) -> None:
        parameters, mixer, feed_forward = model.parameters, layer.mixer, layer.feed_forward

        def norm(name: str | None, eps: float | None = None) -> RMSNorm | None:
            config = layer.norm if eps is None else replace(layer.norm, eps=eps)
            return None if name is None else model.new_norm(config, f"{prefix}.{name}.weight")

        self._factor = parameters.load(f"{prefix}.layer_scalar", 1) if layer.has_factor else None
        around_mixer, around_mlp = layer.mixer_norms, layer.feed_forward_norms
        self.mixer_norm, self.after_mixer = norm(around_mixer.before), norm(around_mixer.after, around_mixer.after_eps)
        self.mixer: Attention | LatentAttention | RecurrentLayer | None = None
        if isinstance(mixer, AttentionConfig):
            source = None if mixer.source is None else model.attention_of(mixer.source)
            self.mixer = Attention(parameters, mixer, model.ropes, f"{prefix}.self_attn", source)
        elif isinstance(mixer, LatentAttentionConfig):
            self.mixer = LatentAttention(parameters, mixer, model.ropes, f"{prefix}.self_attn")
        elif mixer is not None:
            self.mixer = RECURRENT_LAYERS[type(mixer)](parameters, mixer, f"{prefix}.{mixer.block}")
        self.mlp_norm, self.after_mlp = norm(around_mlp.before), norm(around_mlp.after, around_mlp.after_eps)
        self.mlp: MLP | HostedMLP | MoE | None = None
        if isinstance(feed_forward, MLPConfig):
            self.mlp = (HostedMLP if feed_forward.is_hosted else MLP)(parameters, feed_forward, f"{prefix}.mlp")
        elif feed_forward is not None:
            self.mlp = MoE(parameters, feed_forward, f"{prefix}.mlp")
        self.parallel_experts = None
        if layer.experts is not None:
            norms = [model.new_norm(layer.norm, f"{prefix}.{name}.weight") for name in EXPERT_NORMS]
            self.parallel_experts = ParallelExperts(MoE(parameters, layer.experts, f"{prefix}.mlp"), *norms)
        self._own_input = None
        if layer.per_layer_input is not None:
            self._own_input = PerLayerInput(parameters, layer.per_layer_input, prefix)
        self._is_parallel = layer.is_parallel

    def __call__(self, hidden: Tensor, batch: Batch, own_input: Tensor | None = None) -> Tensor:
        """hidden: [tokens, hidden] → [tokens, hidden], the residual stream before and after this layer.

        own_input: [tokens, size], in models whose layers have inputs of their own"""
        mixer, mlp = self.mixer, self.mlp
        if self._is_parallel and self.mixer_norm is not None and mixer is not None and mlp is not None:
            x = self.mixer_norm.centred(hidden)
            return mlp(x, self.mixer_norm, hidden + mixer(x, self.mixer_norm, batch))
        if mixer is not None:
            if self.after_mixer is None:
                hidden = mixer(hidden, self.mixer_norm, batch, hidden)
            else:
                hidden = self.after_mixer(mixer(hidden, self.mixer_norm, batch), residual=hidden)
        if mlp is None:
            return hidden
        if self.after_mlp is None:
            return mlp(hidden, self.mlp_norm, hidden)
        added = mlp(hidden, self.mlp_norm)
        if self.parallel_experts is not None:
            added = self.parallel_experts(added, hidden)
        if self._own_input is None or own_input is None:
            return self.after_mlp(added, residual=hidden, factor=self._factor)
        return self._own_input(self.after_mlp(added, residual=hidden), own_input, self._factor)


class Decoder:
    """A model as the engine sees it, or one stage of it. `embedding`, `norm` and `head` exist where the architecture
    `has_ends`. Another backend overrides what the engine calls: `attentions`, `storages`, the call and `logits`."""

    embedding: Embedding
    norm: RMSNorm
    head: Head
    prediction: PredictionHead | None = None
    """The prediction head; None if the model has none or is loaded without it."""

    tower: Tower | None = None
    """On the rank that has it."""

    def __init__(
        self, architecture: Architecture, parameters: Parameters, num_positions: int, step_tokens: int = 0
    ) -> None:
        """`num_positions`: the longest sequence this instance will see. `step_tokens`: the most positions of pictures
        in one step."""
        self.architecture = architecture
        self.config = architecture.config
        self.parameters = parameters
        config, prefix = self.config, architecture.prefix
        num_placed = step_tokens if architecture.pictures.has_axes else 0
        self.ropes = RopeTables(num_positions, parameters.device, num_placed)
        if architecture.has_ends:
            self.embedding = Embedding(parameters, config.vocab, config.hidden, f"{prefix}.embed_tokens.weight")
        own_inputs = architecture.ends.per_layer_inputs if architecture.has_ends else None
        self._padding_token = int(architecture.raw.get("pad_token_id") or 0)
        self._own_inputs = None if own_inputs is None else PerLayerInputs(parameters, own_inputs, prefix)
        self.layers: list[DecoderLayer] = []
        for name, layer in architecture.named_layers():
            self.layers.append(DecoderLayer(self, layer, name))
        if architecture.has_ends:
            tied = self.embedding.matrix if config.tied else None
            self.norm = self.new_norm(architecture.ends.norm, f"{prefix}.norm.weight")
            self.head = Head(parameters, config.vocab, config.hidden, "lm_head", tied)
        if architecture.head is not None:
            self._head_layer = DecoderLayer(self, architecture.head.layer, architecture.head.layer_name)
            self.prediction = PredictionHead(
                self, architecture.head, config.hidden, self._head_layer, self._draft_output(architecture)
            )

    def _draft_output(self, architecture: Architecture) -> Head:
        """The output matrix as the prediction head has it: a copy in few bits, or the model's own."""
        parameters, vocab, hidden = self.parameters, self.config.vocab, self.config.hidden
        layout = draft_output(parameters.packing, architecture.output, hidden)
        if layout is None:
            return self.head
        rows = len(parameters.group.shard.part(vocab))
        copied = parameters.quantised_copy(layout, architecture.output, rows, hidden)
        return Head(parameters, vocab, hidden, "lm_head", copied)

    def new_norm(self, norm: NormConfig, source: str) -> RMSNorm:
        """Allocates a norm over the residual stream."""
        return RMSNorm(self.parameters, self.config.hidden, norm, source)

    def attention_of(self, index: int) -> Attention:
        """The attention of a layer that is built already, by its number in the whole model. Raises UnsupportedModel."""
        first = 0 if self.architecture.stage is None else self.architecture.stage.start
        if index < first:
            raise UnsupportedModel(f"layers from {first} on read the keys and values of layer {index}")
        mixer = self.layers[index - first].mixer
        assert isinstance(mixer, Attention)
        return mixer

    @property
    def attentions(self) -> Sequence[CachedAttention]:
        """The layers' attentions, which keep KV, in order; last that of the prediction head."""
        layers = self.layers if self.prediction is None else [*self.layers, self._head_layer]
        return [layer.mixer for layer in layers if isinstance(layer.mixer, (Attention, LatentAttention))]

    @property
    def recurrent_layers(self) -> list[RecurrentLayer]:
        """The layers' mixers that keep a state of fixed size for every row, in order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, RecurrentLayer)]

    def storages(self) -> list[torch.UntypedStorage]:
        """The device memory that the model holds for as long as it is loaded: weights and tables, each piece once."""
        own = [*self.parameters.storages(), *self.ropes.storages()]
        if self.tower is None or self.tower.parameters.device != self.parameters.device:
            return own
        return [*own, *self.tower.parameters.storages()]

    def __call__(self, batch: Batch) -> Tensor:
        """The residual stream after the last layer of this part, which has the embedding: [tokens, hidden]; of a stage,
        as `through_layers` returns it."""
        hidden = self.embedded(batch.tokens)
        if batch.pictures is not None:
            hidden = hidden.index_copy(0, batch.pictures.index, batch.pictures.vectors[:, 0])
        if self._own_inputs is None:
            return self.through_layers(hidden, batch)
        tokens = batch.tokens
        if batch.pictures is not None:  # no token has the inputs of pictures
            tokens = tokens.index_fill(0, batch.pictures.index, self._padding_token)
        return self._through_layers(hidden, self._own_inputs(tokens, hidden), batch)

    def embedded(self, tokens: Tensor) -> Tensor:
        """The residual stream before the first layer: [tokens, hidden]"""
        hidden, ends = self.embedding(tokens), self.architecture.ends
        if ends.embedding_eps is not None:
            hidden = F.rms_norm(hidden, hidden.shape[1:], eps=ends.embedding_eps)
        return hidden if ends.embedding_scale == 1.0 else hidden.mul_(ends.embedding_scale)

    def through_layers(self, hidden: Tensor, batch: Batch) -> Tensor:
        """hidden: [tokens, hidden] → [tokens, hidden], the residual stream before and after the layers.

        On a stage of a model whose layers have inputs of their own, what comes in also has those of its layers and of
        all later ones, and what goes out those of the later ones: [tokens, `stage_width`]."""
        inputs = self.architecture.ends.per_layer_inputs
        if inputs is not None:
            hidden, own = hidden.tensor_split([self.config.hidden], dim=1)
            return self._through_layers(hidden.contiguous(), own.unflatten(1, (-1, inputs.size)), batch)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, batch)
            if batch.pictures is not None and index + 1 < batch.pictures.vectors.shape[1]:
                hidden = hidden.index_add(0, batch.pictures.index, batch.pictures.vectors[:, index + 1])
        return hidden

    @property
    def stage_width(self) -> int:
        """Number of columns that this stage gets from the previous one."""
        inputs, stage = self.architecture.ends.per_layer_inputs, self.architecture.stage
        if inputs is None or stage is None:
            return self.config.hidden
        return self.config.hidden + (self.config.num_layers - stage.start) * inputs.size

    def _through_layers(self, hidden: Tensor, own_inputs: Tensor, batch: Batch) -> Tensor:
        """own_inputs: [tokens, layers, size]"""
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, batch, own_inputs[:, index])
        later = own_inputs[:, len(self.layers) :]
        return torch.cat((hidden, later.flatten(1)), dim=1) if later.shape[1] else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] → [rows, vocab]"""
        logits, cap = self.head.logits(self.norm.centred(hidden), self.norm), self.architecture.ends.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
