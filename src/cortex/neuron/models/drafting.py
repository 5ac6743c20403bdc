"""Which models may draft tokens for others. Imports no torch: a node asks before it loads one."""

from __future__ import annotations

from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.errors import UnsupportedModel


def check_draft(architecture: Architecture) -> None:
    """Raises UnsupportedModel."""
    family = architecture.raw.get("model_type")
    if architecture.pooling is not None:
        raise UnsupportedModel("an embedding or rerank model draws no tokens and cannot be a draft model")
    if architecture.is_recurrent:
        raise UnsupportedModel(
            f"{family} has recurrent layers, whose state cannot leave rejected tokens out, so it cannot be a draft "
            'model; use speculation = "mtp" where the large model has such a head, or "lookup"'
        )
    if architecture.backend != "native":
        raise UnsupportedModel(f"{family} is run by the transformers library and cannot be a draft model")
