"""The model that every encoder family's architecture is built into: embeddings, a norm, and a stack of layers."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.attention import Attention
from cortex.neuron.layers.embedding import Embedding
from cortex.neuron.layers.feed_forward import FeedForward
from cortex.neuron.layers.layer_norm import LayerNorm
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.rope import RopeTables
from cortex.neuron.models.encoders.architecture import POSITIONS, SEGMENTS, EncoderArchitecture
from cortex.neuron.models.layer import LayerConfig


class EncoderLayer:
    """Attention and a feed-forward block, each added to its input, with a norm before the block or after the sum."""

    def __init__(self, model: Encoder, layer: LayerConfig, prefix: str) -> None:
        attention, feed_forward = model.architecture.parts_of(layer)
        self._attention = Attention(model.parameters, attention, model.ropes, f"{prefix}.self_attn")
        self._feed_forward = FeedForward(model.parameters, feed_forward, f"{prefix}.mlp")
        names = (
            layer.mixer_norms.before,
            layer.mixer_norms.after,
            layer.feed_forward_norms.before,
            layer.feed_forward_norms.after,
        )
        norms = [None if name is None else model.new_norm(f"{prefix}.{name}") for name in names]
        self._before_attention, self._after_attention, self._before_feed_forward, self._after_feed_forward = norms

    def __call__(self, hidden: Tensor, batch: Batch) -> Tensor:
        """hidden: [tokens, hidden] → [tokens, hidden], the residual stream before and after this layer."""
        hidden = self._attention(_normed(self._before_attention, hidden), None, batch, hidden)
        hidden = _normed(self._after_attention, hidden)
        hidden = self._feed_forward(_normed(self._before_feed_forward, hidden), hidden)
        return _normed(self._after_feed_forward, hidden)


class Encoder:
    """See `pooling.model.Body`."""

    def __init__(self, architecture: EncoderArchitecture, parameters: Parameters, num_positions: int) -> None:
        self.architecture = architecture
        self.parameters = parameters
        self.ropes = RopeTables(num_positions, parameters.device)
        config, ends, prefix = architecture.config, architecture.ends, architecture.prefix
        self._embedding = Embedding(parameters, config.vocab, config.hidden, f"{prefix}.embed_tokens.weight")
        self._tables = {
            name: parameters.load(f"{prefix}.{name}.weight", rows, config.hidden) for name, rows in ends.tables.items()
        }
        norms = {name: self.new_norm(f"{prefix}.{name}") for name in ends.norms}
        self._embedding_norm, self._last_norm = norms["embed_norm"], norms.get("norm")
        self.layers = [EncoderLayer(self, layer, name) for name, layer in architecture.named_layers()]

    def new_norm(self, source: str) -> LayerNorm:
        norm = self.architecture.norm
        return LayerNorm(self.parameters, self.architecture.config.hidden, norm.eps, source, bias=norm.has_bias)

    def embed(self, batch: Batch, segments: Tensor) -> Tensor:
        hidden = self._embedding(batch.tokens)
        if POSITIONS in self._tables:
            hidden = hidden + self._tables[POSITIONS][batch.positions + self.architecture.first_position]
        if SEGMENTS in self._tables:
            table = self._tables[SEGMENTS]
            hidden = hidden + table[segments.clamp(max=len(table) - 1)]
        return self._embedding_norm(hidden)

    def normed(self, hidden: Tensor) -> Tensor:
        return _normed(self._last_norm, hidden)


def _normed(norm: LayerNorm | None, hidden: Tensor) -> Tensor:
    return hidden if norm is None else norm(hidden)
