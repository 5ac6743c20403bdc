"""The families that the engine runs. To add one, see docs/adding-a-model.md. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cortex.neuron.models.architecture import Architecture, Architectures
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.families import (
    cohere,
    deepseek,
    encoders,
    gemma,
    glm,
    granite,
    lfm2,
    llama,
    mistral,
    mixtures,
    muse,
    nemotron,
    qwen,
)
from cortex.neuron.models.transformers.architecture import TransformersArchitecture
from cortex.neuron.models.transformers.library import library_model
from cortex.neuron.weights.checkpoint import Checkpoint, open_checkpoint
from cortex.neuron.weights.safetensors.checkpoint import SafetensorsCheckpoint
from cortex.neuron.weights.safetensors.published import unreadable_method

FAMILIES: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    **cohere.ARCHITECTURES,
    **deepseek.ARCHITECTURES,
    **gemma.ARCHITECTURES,
    **glm.ARCHITECTURES,
    **granite.ARCHITECTURES,
    **lfm2.ARCHITECTURES,
    **llama.ARCHITECTURES,
    **mistral.ARCHITECTURES,
    **mixtures.ARCHITECTURES,
    **muse.ARCHITECTURES,
    **nemotron.ARCHITECTURES,
    **qwen.ARCHITECTURES,
}
"""Those of models that generate text."""
ENCODERS: Architectures = encoders.ARCHITECTURES
"""Those of models that only make vectors and scores."""


def open_model(path: Path) -> tuple[Checkpoint, Architecture]:
    """A model's files and what they describe. Raises CheckpointError, or UnsupportedModel."""
    checkpoint = open_checkpoint(path)
    try:
        architecture = read_architecture(checkpoint.config)
        if not isinstance(architecture, TransformersArchitecture):
            return checkpoint, architecture
        if not isinstance(checkpoint, SafetensorsCheckpoint):
            raise UnsupportedModel(f"{architecture.raw['model_type']} is loaded from safetensors only, not from GGUF")
        return checkpoint.as_published(), architecture
    except BaseException:
        checkpoint.close()
        raise


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a checkpoint's config describes: a family here, or one that the transformers library runs.

    Raises UnsupportedModel.
    """
    model_type = config.get("model_type")
    family = (FAMILIES.get(model_type) or ENCODERS.get(model_type)) if isinstance(model_type, str) else None
    if family is None:
        _check_library(config)
    _reject_quantised(config)
    try:
        return TransformersArchitecture(config) if family is None else family(config)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise UnsupportedModel(f"the model's config is damaged ({error}); download the model again") from error


def _check_library(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel unless the transformers library has the model."""
    model_type, reason = config.get("model_type"), "is it a model's config?"
    if isinstance(model_type, str):
        if config.get("is_encoder_decoder"):
            raise UnsupportedModel(f"{model_type} is an encoder-decoder model, which is not supported")
        try:
            library_model(model_type)
            return
        except UnsupportedModel as error:
            reason = f"{error}{'; the code of its repository is never run' if config.get('auto_map') else ''}"
    near = difflib.get_close_matches(str(model_type)[:80], (*FAMILIES, *ENCODERS), n=3)
    nearest = f"The nearest native families are {', '.join(near)}; docs" if near else "docs"
    raise UnsupportedModel(
        f"model_type {model_type!r:.80} is not supported: {reason}. {nearest}/models.md lists all families, and "
        "docs/adding-a-model.md shows how to add one"
    )


def _reject_quantised(config: Mapping[str, Any]) -> None:
    """Rejects weights that are quantised in a way that cannot be read."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        quantised = part.get("quantization_config") or part.get("quantization")  # as MLX calls it
        if not quantised:
            continue
        if (method := unreadable_method(quantised)) is not None:
            raise UnsupportedModel(
                f"the weights are quantised ({method}), which is not supported in safetensors; "
                "use FP8, MXFP4, AWQ, GPTQ or compressed-tensors, the model's unquantised repository, or a GGUF file"
            )


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
