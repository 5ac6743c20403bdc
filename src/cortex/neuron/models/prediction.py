"""The head that some models are published with for predicting further tokens (multi-token prediction), as their configs
describe it. Imports no torch.

A head is one decoder layer. Its input at a position is made of the hidden state there and the embedding of the token
after it, so its output predicts the token after that one. It shares embedding and output matrix with its model.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from cortex.neuron.layers.configs import NormConfig, Shard
from cortex.neuron.models.layer import LayerConfig


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


def of_next_layer(layer: LayerConfig, norm: NormConfig, name: str, *, carries_norm: bool) -> PredictionConfig:
    """The head as DeepSeek and GLM publish it: `name` is the layer after the last one."""
    return PredictionConfig(
        layer,
        norm,
        layer_name=name,
        projection=f"{name}.eh_proj",
        embedding_norm=f"{name}.enorm",
        hidden_norm=f"{name}.hnorm",
        last_norm=f"{name}.shared_head.norm",
        carries_norm=carries_norm,
    )
