"""The base of recurrent layers: mixers that keep a state of fixed size for every sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.linear import Linear, RowParallelLinear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.recurrent.configs import RecurrentConfig


class RecurrentLayer(ABC):
    """Projects tokens, mixes them with the state of their row, and projects the result back. Reads and updates the
    states in `state`, which the engine sets before the first step."""

    state: tuple[Tensor, ...]
    """A tensor for each part of the config's state, [slots, *shape], each slot dense. A row that starts at position 0
    ignores the old contents of its slot."""

    def __init__(self, parameters: Parameters, config: RecurrentConfig, prefix: str) -> None:
        """`prefix`: of the layer's tensors in the checkpoint."""
        self.config = config
        self.input = Linear(parameters, config.hidden, config.input_rows(prefix))
        ((name, columns),) = config.output_columns(prefix).items()
        self.output = RowParallelLinear(parameters, columns, {name: config.hidden})

    def __call__(self, x: Tensor, norm: RMSNorm | None, batch: Batch, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] → residual + layer(norm(x)). `residual` may be overwritten: use the result."""
        return self.output(self.mix(self.input(x, norm=norm), batch), residual=residual)

    @abstractmethod
    def mix(self, projected: Tensor, batch: Batch) -> Tensor:
        """projected: [tokens, input rows] → [tokens, output columns]. Advances the state of the rows."""


def load_conv_weight(parameters: Parameters, taps: int, channels: int, source: str) -> Tensor:
    """The weight of a causal convolution: [taps, channels]"""
    weight = parameters.empty(taps, channels)
    parameters.bind(source, weight, lambda stored: stored[:, 0].t(), shape=(channels, 1, taps))
    return weight
