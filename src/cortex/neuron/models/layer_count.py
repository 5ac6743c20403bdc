"""Whether a checkpoint has the layers that its config counts. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.errors import UnsupportedModel


def check_layer_count(architecture: Architecture, names: Iterable[str]) -> None:
    """Raises UnsupportedModel for tensors of layers that the config does not count: without them the model would
    respond, and wrongly. A layer without tensors is noticed when its tensors are read."""
    layer = re.compile(re.escape(f"{architecture.prefix}.layers.") + r"(\d{1,9})\.")
    num_layers = max((int(match[1]) + 1 for name in names if (match := layer.match(name))), default=0)
    if num_layers > architecture.config.num_layers + architecture.num_unread_layers:
        raise UnsupportedModel(
            f"the checkpoint has {num_layers} layers, its config {architecture.config.num_layers}; "
            "is this the config of these weights?"
        )
