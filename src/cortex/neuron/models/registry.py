"""The families this engine runs. Adding one is a file in this folder and a line here: docs/adding-a-model.md.

Imports no torch: the daemon reads the names without loading an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cortex.neuron.models.errors import UnsupportedModel

if TYPE_CHECKING:
    from cortex.neuron.models.decoder import Decoder

FAMILIES: Mapping[str, str] = {
    "llama": "cortex.neuron.models.llama:Llama",
    "qwen3": "cortex.neuron.models.qwen3:Qwen3",
    "qwen3_moe": "cortex.neuron.models.qwen3_moe:Qwen3Moe",
    "qwen3_5": "cortex.neuron.models.qwen3_next:Qwen35Multimodal",
    "qwen3_5_moe": "cortex.neuron.models.qwen3_next:Qwen35Multimodal",
    "qwen3_5_moe_text": "cortex.neuron.models.qwen3_next:Qwen35",
    "qwen3_5_text": "cortex.neuron.models.qwen3_next:Qwen35",
    "qwen3_next": "cortex.neuron.models.qwen3_next:Qwen3Next",
}
"""`model_type` in a model's config → module and class."""

SUPPORTED: tuple[str, ...] = tuple(FAMILIES)


def reject_quantised(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel for weights that mean nothing without the scales beside them (FP8, AWQ, GPTQ and kin)."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        quantised = part.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
            raise UnsupportedModel(
                f"the weights are quantised ({method or 'method not named'}), which is not supported in safetensors; "
                "take the model's unquantised repository, or a GGUF file"
            )


def family_of(config: Mapping[str, Any]) -> type[Decoder]:
    """The class for a checkpoint's config. Raises UnsupportedModel and says what it saw."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not supported; supported are {', '.join(SUPPORTED)} "
            "(docs/adding-a-model.md shows how to add one)"
        )
    reject_quantised(config)
    module, name = FAMILIES[model_type].split(":")
    return getattr(import_module(module), name)  # type: ignore[no-any-return]
