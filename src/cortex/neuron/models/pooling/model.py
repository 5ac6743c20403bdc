"""A model that makes a vector or a score of each text: an encoder or a decoder, the pooling, and the steps after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.attention import Attention
from cortex.neuron.layers.embedding import Embedding
from cortex.neuron.layers.feed_forward import ACTIVATIONS, FeedForward
from cortex.neuron.layers.linear import Linear
from cortex.neuron.layers.norm import LayerNorm
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.rope import RopeTables
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.families.encoders import POSITIONS, SEGMENTS, EncoderArchitecture
from cortex.neuron.models.layer import LayerConfig
from cortex.neuron.models.pooling.config import (
    DenseStep,
    DifferenceStep,
    LogitStep,
    NormalizeStep,
    NormStep,
    PoolingMode,
    Step,
)


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


Layer = Callable[[Tensor, Batch], Tensor]


class Body(Protocol):
    """The model that computes the hidden states of texts, layer by layer."""

    @property
    def ropes(self) -> RopeTables: ...

    @property
    def layers(self) -> Sequence[Layer]:
        """[tokens, hidden] → [tokens, hidden] each"""

    def embed(self, batch: Batch, segments: Tensor) -> Tensor:
        """The residual stream before the first layer: [tokens, hidden]. segments: [tokens] int64"""

    def normed(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] after the last layer → the last hidden states"""


class DecoderBody:
    """A decoder without pages: a text is computed in one pass."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.ropes = decoder.ropes
        self.layers = decoder.layers

    def embed(self, batch: Batch, segments: Tensor) -> Tensor:
        del segments
        return self._decoder.embedded(batch.tokens)

    def normed(self, hidden: Tensor) -> Tensor:
        norm = self._decoder.norm
        return norm(norm.centred(hidden))

    def token_rows(self, tokens: Sequence[int]) -> Tensor:
        """The rows of the head for some tokens: [tokens, hidden] float32"""
        matrix = self._decoder.head.matrix
        return matrix.rows(torch.tensor(tokens, device=self._decoder.parameters.device), torch.float32)


class PooledModel:
    """Belongs to the engine thread. `begin`, then each of `layers`, then `finish`."""

    def __init__(self, architecture: Architecture, parameters: Parameters, num_positions: int) -> None:
        assert architecture.pooling is not None
        self.architecture = architecture
        self.config = architecture.config
        self.parameters = parameters
        self._pooling = architecture.pooling
        if isinstance(architecture, EncoderArchitecture):
            self._body: Encoder | DecoderBody = Encoder(architecture, parameters, num_positions)
        else:
            self._body = DecoderBody(Decoder(architecture, parameters, num_positions))
        self._steps = [_step(step, parameters, self._body) for step in self._pooling.steps]

    @property
    def layers(self) -> Sequence[Layer]:
        return self._body.layers

    @property
    def width(self) -> int:
        """The length of a text's vector; 1 for a score."""
        return self._pooling.width(self.config.hidden)

    @property
    def ropes(self) -> RopeTables:
        return self._body.ropes

    def storages(self) -> list[torch.UntypedStorage]:
        """The device memory that the model holds for as long as it is loaded: weights and tables, each piece once."""
        return [*self.parameters.storages(), *self.ropes.storages()]

    def begin(self, batch: Batch, segments: Tensor) -> Tensor:
        """The residual stream before the first layer: [tokens, hidden]"""
        return self._body.embed(batch, segments)

    def finish(self, hidden: Tensor, batch: Batch) -> Tensor:
        """hidden: [tokens, hidden] after the last layer → [texts, width] float32"""
        parts = [pooled(hidden, batch, mode, self._body.normed) for mode in self._pooling.modes]
        vectors = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        for step in self._steps:
            vectors = step(vectors)
        return vectors.float()


def pooled(hidden: Tensor, batch: Batch, mode: PoolingMode, normed: Callable[[Tensor], Tensor]) -> Tensor:
    """hidden: [tokens, hidden] → [texts, hidden] float32"""
    assert batch.prefill_offsets is not None
    offsets = batch.prefill_offsets.long()
    if mode == "cls":
        return normed(hidden.index_select(0, offsets[:-1])).float()
    if mode == "last":
        return normed(hidden.index_select(0, offsets[1:] - 1)).float()
    counts = offsets.diff()
    texts = torch.repeat_interleave(counts, output_size=len(hidden))
    states = normed(hidden).float()
    shape = (len(counts), states.shape[1])
    if mode == "max":
        lowest = torch.full(shape, -torch.inf, device=hidden.device)
        return lowest.scatter_reduce_(0, texts[:, None].expand_as(states), states, "amax")
    weights = (batch.positions + 1).float() if mode == "weighted_mean" else torch.ones_like(texts, dtype=torch.float32)
    total = torch.zeros(shape, device=hidden.device).index_add_(0, texts, states * weights[:, None])
    divisor = torch.zeros(len(counts), device=hidden.device).index_add_(0, texts, weights)[:, None]
    return total / (divisor.sqrt() if mode == "mean_sqrt_len" else divisor)


def _step(step: Step, parameters: Parameters, body: Encoder | DecoderBody) -> Callable[[Tensor], Tensor]:
    match step:
        case DenseStep():
            linear = Linear(parameters, step.inputs, {step.source: step.outputs}, bias=step.bias)
            activation = ACTIVATIONS[step.activation]

            def dense(x: Tensor) -> Tensor:
                return activation(linear(x.to(parameters.dtype)).float())

            return dense
        case NormStep():
            norm = LayerNorm(parameters, step.size, step.eps, step.source, bias=step.bias)
            return lambda x: norm(x.to(parameters.dtype)).float()
        case NormalizeStep():
            return lambda x: F.normalize(x, dim=-1)
        case DifferenceStep():
            return lambda x: x[:, :1] - x[:, 1:]
        case LogitStep():
            assert isinstance(body, DecoderBody), "only decoders have logits"
            return lambda x: _logit(x, step, body)


def _logit(x: Tensor, step: LogitStep, body: DecoderBody) -> Tensor:
    """x: [texts, hidden] → [texts, 1]"""
    if step.false_token is None:
        return F.linear(x, body.token_rows([step.true_token]))
    true_row, false_row = body.token_rows([step.true_token, step.false_token])
    return F.linear(x, (true_row - false_row)[None])
