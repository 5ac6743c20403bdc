"""The gated short convolution: a mixer whose state is the latest few tokens."""

from __future__ import annotations

from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.recurrent.short_conv import short_conv
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.recurrent.configs import ShortConvConfig
from cortex.neuron.layers.recurrent.layer import RecurrentLayer, load_conv_weight


class ShortConv(RecurrentLayer):
    def __init__(self, parameters: Parameters, config: ShortConvConfig, prefix: str) -> None:
        super().__init__(parameters, config, prefix)
        self.weight = load_conv_weight(parameters, config.conv_taps, config.channels, f"{prefix}.conv.weight")

    def mix(self, projected: Tensor, batch: Batch) -> Tensor:
        (recent,) = self.state
        return short_conv(projected, self.weight, batch, recent)
