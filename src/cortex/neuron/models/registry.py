"""The families that the engine runs. To add one, see docs/adding-a-model.md. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.encoders.bert import Bert, Roberta
from cortex.neuron.models.encoders.eurobert import EuroBert, jina_embeddings
from cortex.neuron.models.encoders.gte import Gte
from cortex.neuron.models.encoders.modernbert import ModernBert
from cortex.neuron.models.encoders.nomic import NomicBert
from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.models.families.cohere2 import Cohere2
from cortex.neuron.models.families.ernie4_5 import Ernie45
from cortex.neuron.models.families.gemma3 import Gemma3, Gemma3Multimodal
from cortex.neuron.models.families.gemma4 import (
    Gemma4,
    Gemma4Multimodal,
    Gemma4Unified,
    Gemma4UnifiedMultimodal,
)
from cortex.neuron.models.families.glm4 import Glm4
from cortex.neuron.models.families.granite import Granite
from cortex.neuron.models.families.hunyuan import HunyuanDense
from cortex.neuron.models.families.latent import Youtu
from cortex.neuron.models.families.llama import Llama, SeedOss, SmolLM3
from cortex.neuron.models.families.mistral import Ministral3, Mistral, mistral3
from cortex.neuron.models.families.muse_glimmer import MuseGlimmer, MuseGlimmerMultimodal
from cortex.neuron.models.families.olmo import Exaone4, Olmo2, Olmo3
from cortex.neuron.models.families.phi3 import Phi3
from cortex.neuron.models.families.qwen import Qwen2, Qwen3, Qwen3VL
from cortex.neuron.models.hybrids.granite_hybrid import GraniteMoeHybrid
from cortex.neuron.models.hybrids.lfm2 import Lfm2
from cortex.neuron.models.hybrids.lfm2_moe import Lfm2Moe
from cortex.neuron.models.hybrids.nemotron_h import NemotronH
from cortex.neuron.models.hybrids.qwen3_next import Qwen3Next, Qwen35Multimodal
from cortex.neuron.models.mixtures.deepseek import DeepseekV2, DeepseekV3, Glm4MoeLite
from cortex.neuron.models.mixtures.ernie4_5_moe import Ernie45Moe
from cortex.neuron.models.mixtures.glm4_moe import Glm4Moe
from cortex.neuron.models.mixtures.gpt_oss import GptOss
from cortex.neuron.models.mixtures.laguna import Laguna
from cortex.neuron.models.mixtures.minimax_m2 import MiniMaxM2
from cortex.neuron.models.mixtures.qwen3_moe import Mellum, Qwen3Moe, Qwen3VLMoe
from cortex.neuron.models.transformers.architecture import TransformersArchitecture
from cortex.neuron.models.transformers.library import library_model
from cortex.neuron.weights.checkpoint import Checkpoint, open_checkpoint
from cortex.neuron.weights.safetensors.checkpoint import SafetensorsCheckpoint
from cortex.neuron.weights.safetensors.published import unreadable_method

FAMILIES: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    "cohere2": Cohere2,
    "deepseek_v2": DeepseekV2,
    "deepseek_v3": DeepseekV3,
    "ernie4_5": Ernie45,
    "ernie4_5_moe": Ernie45Moe,
    "exaone4": Exaone4,
    "gemma3": Gemma3Multimodal,
    "gemma3_text": Gemma3,
    "gemma4": Gemma4Multimodal,
    "gemma4_text": Gemma4,
    "gemma4_unified": Gemma4UnifiedMultimodal,
    "gemma4_unified_text": Gemma4Unified,
    "glm4": Glm4,
    "glm4_moe": Glm4Moe,
    "gpt_oss": GptOss,
    "glm4_moe_lite": Glm4MoeLite,
    "granite": Granite,
    "granitemoehybrid": GraniteMoeHybrid,
    "hunyuan_v1_dense": HunyuanDense,
    "kimi_k2": DeepseekV3,
    "laguna": Laguna,
    "lfm2": Lfm2,
    "lfm2_moe": Lfm2Moe,
    "llama": Llama,
    "mellum": Mellum,
    "minimax_m2": MiniMaxM2,
    "ministral3": Ministral3,
    "mistral": Mistral,
    "mistral3": mistral3,
    "muse_glimmer": MuseGlimmerMultimodal,
    "muse_glimmer_text": MuseGlimmer,
    "nemotron_h": NemotronH,
    "olmo2": Olmo2,
    "olmo3": Olmo3,
    "phi3": Phi3,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "qwen3_5": Qwen35Multimodal,
    "qwen3_5_moe": Qwen35Multimodal,
    "qwen3_5_moe_text": Qwen3Next,
    "qwen3_5_text": Qwen3Next,
    "qwen3_next": Qwen3Next,
    "qwen3_vl": Qwen3VL,
    "qwen3_vl_moe": Qwen3VLMoe,
    "seed_oss": SeedOss,
    "smollm3": SmolLM3,
    "youtu": Youtu,
}
"""`model_type` in a model's config → the architecture that reads the config."""
ENCODERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    "bert": Bert,
    "camembert": Roberta,
    "eurobert": EuroBert,
    "gte": Gte,
    "jina_embeddings_v5": jina_embeddings,
    "modernbert": ModernBert,
    "new": Gte,
    "nomic_bert": NomicBert,
    "roberta": Roberta,
    "xlm-roberta": Roberta,
}
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
