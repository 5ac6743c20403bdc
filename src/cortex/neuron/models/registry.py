"""The families that the engine runs. To add one, see docs/adding-a-model.md. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.llama import Llama
from cortex.neuron.models.qwen3 import Qwen3
from cortex.neuron.models.qwen3_moe import Qwen3Moe
from cortex.neuron.models.qwen3_next import Qwen3Next, Qwen35Multimodal
from cortex.neuron.weights.safetensors.published import is_readable

FAMILIES: dict[str, type[Architecture]] = {
    "llama": Llama,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "qwen3_5": Qwen35Multimodal,
    "qwen3_5_moe": Qwen35Multimodal,
    "qwen3_5_moe_text": Qwen3Next,
    "qwen3_5_text": Qwen3Next,
    "qwen3_next": Qwen3Next,
}
"""`model_type` in a model's config → the architecture that reads the config."""


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a checkpoint's config describes. Raises UnsupportedModel."""
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)} "
            "(docs/adding-a-model.md shows how to add one)"
        )
    _reject_quantised(config)
    try:
        return family(config)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise UnsupportedModel(f"the model's config is damaged ({error}); download the model again") from error


def _reject_quantised(config: Mapping[str, Any]) -> None:
    """Rejects weights that are quantised in a way that cannot be read."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        quantised = part.get("quantization_config")
        if not quantised:
            continue
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        if not is_readable(method):
            raise UnsupportedModel(
                f"the weights are quantised ({method or 'method not named'}), which is not supported in safetensors; "
                "use FP8, AWQ, GPTQ or compressed-tensors, the model's unquantised repository, or a GGUF file"
            )
