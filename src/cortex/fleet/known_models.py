"""Well-known models by short name: their repositories, sizes and spellings.

A name matches in any case, with `:`, `_` or nothing for `-`, without common suffixes (`-Instruct`, `-it`, a date), and
shortened at a `-` as long as it is unambiguous: `gpt-oss:20b`, `gemma4-26b`, `Qwen2.5-Coder-7B`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Final

_SUFFIX: Final = re.compile(r"(?:-instruct|-it|-pt|-bf16|-chat|-reasoning|-v\d+(?:\.\d+)?|-\d{4}|-\d{2}-\d{4})+$")
_SEPARATORS: Final = re.compile(r"[:_\s/]+")
_GATED: Final = ("meta-llama/", "google/gemma-3-", "google/embeddinggemma-")
"""Gated repositories, for accounts that have accepted a licence. Unsloth publishes the same weights ungated under the
same names."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    repository: str
    """The repository of its publisher."""
    billions: float
    """Billions of parameters, all experts included."""
    gguf: str | None = None
    """A repository with the same model as GGUF files."""
    bytes_per_weight: float = 2.0
    """As published."""
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its short name, which clients use."""
        return _SUFFIX.sub("", self.repository.rpartition("/")[2].lower().replace("_", "-"))

    @property
    def open_repository(self) -> str:
        """A repository with its weights that needs no account."""
        is_gated = self.repository.startswith(_GATED)
        return f"unsloth/{self.repository.rpartition('/')[2]}" if is_gated else self.repository

    @property
    def weight_bytes(self) -> int:
        return int(self.billions * 1e9 * self.bytes_per_weight)


class AmbiguousName(Exception):
    """Several models have names that begin like this one."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(names)
        self.names = names


def known_model(name: str) -> KnownModel | None:
    """The model that `name` stands for; None if there is none. Raises AmbiguousName."""
    wanted = _squeezed(name)
    if (found := _EXACT.get(wanted)) is not None:
        return found
    begun = tuple(model for model in KNOWN_MODELS if wanted in _beginnings(model))
    if len(begun) > 1:
        raise AmbiguousName(tuple(model.name for model in begun))
    return begun[0] if begun else None


def known_repository(name: str) -> str | None:
    """The repository of the model that `name` stands for, which needs no account; None if there is none, or more than
    one."""
    try:
        model = known_model(name)
    except AmbiguousName:
        return None
    return None if model is None or "/" in name else model.open_repository


def nearest_names(name: str, limit: int = 3) -> tuple[str, ...]:
    """Names of known models with a similar spelling."""
    return tuple(difflib.get_close_matches(name.lower().replace(":", "-"), _NAMES, n=limit, cutoff=0.5))


def _squeezed(name: str) -> str:
    name = _SEPARATORS.sub("-", name.strip().lower().removesuffix(":latest"))
    return _SUFFIX.sub("", name).replace("-", "")


def _beginnings(model: KnownModel) -> frozenset[str]:
    """Its name up to each `-`."""
    words = model.name.split("-")
    return frozenset("".join(words[:count]) for count in range(1, len(words) + 1))


def _unsloth(repository: str, billions: float, *aliases: str) -> KnownModel:
    """A model that Unsloth publishes as GGUF under the same name."""
    return KnownModel(repository, billions, f"unsloth/{repository.rpartition('/')[2]}-GGUF", aliases=aliases)


KNOWN_MODELS: Final = (
    KnownModel("openai/gpt-oss-20b", 20.9, "unsloth/gpt-oss-20b-GGUF", 0.66, ("gpt-oss",)),
    KnownModel("openai/gpt-oss-120b", 116.8, "unsloth/gpt-oss-120b-GGUF", 0.56),
    _unsloth("google/gemma-4-E2B-it", 5.1),
    _unsloth("google/gemma-4-E4B-it", 8.0, "gemma4"),
    _unsloth("google/gemma-4-12b-it", 12.0),
    _unsloth("google/gemma-4-26B-A4B-it", 25.2),
    _unsloth("google/gemma-4-31B-it", 30.7),
    _unsloth("google/gemma-3-270m-it", 0.27),
    _unsloth("google/gemma-3-1b-it", 1.0),
    _unsloth("google/gemma-3-4b-it", 4.3, "gemma3"),
    _unsloth("google/gemma-3-12b-it", 12.2),
    _unsloth("google/gemma-3-27b-it", 27.4),
    _unsloth("Qwen/Qwen3.6-27B", 26.9),
    _unsloth("Qwen/Qwen3.6-35B-A3B", 34.7, "qwen3.6"),
    _unsloth("Qwen/Qwen3.5-0.8B", 0.8),
    _unsloth("Qwen/Qwen3.5-2B", 2.0),
    _unsloth("Qwen/Qwen3.5-4B", 4.2),
    _unsloth("Qwen/Qwen3.5-9B", 9.0, "qwen3.5"),
    _unsloth("Qwen/Qwen3.5-27B", 26.9),
    _unsloth("Qwen/Qwen3.5-35B-A3B", 34.7),
    _unsloth("Qwen/Qwen3-0.6B", 0.6),
    _unsloth("Qwen/Qwen3-1.7B", 1.7),
    _unsloth("Qwen/Qwen3-4B", 4.0),
    _unsloth("Qwen/Qwen3-8B", 8.2, "qwen3"),
    _unsloth("Qwen/Qwen3-14B", 14.8),
    _unsloth("Qwen/Qwen3-32B", 32.8),
    _unsloth("Qwen/Qwen3-30B-A3B-Instruct-2507", 30.5),
    _unsloth("Qwen/Qwen3-Coder-30B-A3B-Instruct", 30.5, "qwen3-coder"),
    _unsloth("Qwen/Qwen3-Next-80B-A3B-Instruct", 80.3, "qwen3-next"),
    _unsloth("Qwen/Qwen3-VL-2B-Instruct", 2.1),
    _unsloth("Qwen/Qwen3-VL-4B-Instruct", 4.4),
    _unsloth("Qwen/Qwen3-VL-8B-Instruct", 8.8, "qwen3-vl"),
    _unsloth("Qwen/Qwen3-VL-32B-Instruct", 33.4),
    _unsloth("Qwen/Qwen3-VL-30B-A3B-Instruct", 31.1),
    *(
        KnownModel(f"Qwen/Qwen2.5-{size}-Instruct", billions, f"Qwen/Qwen2.5-{size}-Instruct-GGUF")
        for size, billions in (("0.5B", 0.5), ("1.5B", 1.5), ("3B", 3.1), ("14B", 14.8), ("32B", 32.8), ("72B", 72.7))
    ),
    KnownModel("Qwen/Qwen2.5-7B-Instruct", 7.6, "Qwen/Qwen2.5-7B-Instruct-GGUF", aliases=("qwen2.5",)),
    *(
        KnownModel(f"Qwen/Qwen2.5-Coder-{size}-Instruct", billions, f"Qwen/Qwen2.5-Coder-{size}-Instruct-GGUF")
        for size, billions in (("0.5B", 0.5), ("1.5B", 1.5), ("3B", 3.1), ("14B", 14.8), ("32B", 32.8))
    ),
    KnownModel(
        *("Qwen/Qwen2.5-Coder-7B-Instruct", 7.6, "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF"), aliases=("qwen2.5-coder",)
    ),
    _unsloth("mistralai/Mistral-Small-3.2-24B-Instruct-2506", 24.0, "mistral-small"),
    _unsloth("mistralai/Magistral-Small-2509", 24.0, "magistral"),
    _unsloth("mistralai/Devstral-Small-2507", 23.6, "devstral"),
    KnownModel(
        *("mistralai/Devstral-Small-2-24B-Instruct-2512", 24.0, "unsloth/Devstral-Small-2-24B-Instruct-2512-GGUF", 1.1)
    ),
    _unsloth("mistralai/Mistral-Nemo-Instruct-2407", 12.2),
    KnownModel("mistralai/Mistral-7B-Instruct-v0.3", 7.2, aliases=("mistral",)),
    *(
        KnownModel(f"mistralai/Ministral-3-{size}-Instruct-2512", billions, bytes_per_weight=1.1)
        for size, billions in (("3B", 3.8), ("8B", 8.9), ("14B", 13.9))
    ),
    _unsloth("zai-org/GLM-4.7-Flash", 29.9),
    _unsloth("zai-org/GLM-4.5-Air", 110.5),
    _unsloth("zai-org/GLM-4-9B-0414", 9.4, "glm-4"),
    _unsloth("zai-org/GLM-4-32B-0414", 32.6),
    _unsloth("microsoft/phi-4", 14.7),
    _unsloth("microsoft/Phi-4-mini-instruct", 3.8),
    KnownModel("microsoft/Phi-3.5-mini-instruct", 3.8),
    _unsloth("ibm-granite/granite-4.0-micro", 3.4),
    _unsloth("ibm-granite/granite-4.0-h-micro", 3.2),
    _unsloth("ibm-granite/granite-4.0-h-tiny", 6.9, "granite4"),
    _unsloth("ibm-granite/granite-4.0-h-small", 32.2),
    KnownModel("ibm-granite/granite-3.3-2b-instruct", 2.5),
    KnownModel("ibm-granite/granite-3.3-8b-instruct", 8.2, aliases=("granite3.3",)),
    KnownModel("allenai/Olmo-3-7B-Instruct", 7.3, aliases=("olmo3",)),
    KnownModel("allenai/OLMo-2-0325-32B-Instruct", 32.2, aliases=("olmo2-32b",)),
    _unsloth("HuggingFaceTB/SmolLM3-3B", 3.1, "smollm3"),
    KnownModel("HuggingFaceTB/SmolLM2-135M-Instruct", 0.13),
    KnownModel("HuggingFaceTB/SmolLM2-360M-Instruct", 0.36),
    KnownModel("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1.7, aliases=("smollm2",)),
    _unsloth("ByteDance-Seed/Seed-OSS-36B-Instruct", 36.2, "seed-oss"),
    KnownModel("LiquidAI/LFM2-1.2B", 1.2, "LiquidAI/LFM2-1.2B-GGUF"),
    KnownModel("LiquidAI/LFM2-8B-A1B", 8.3, "LiquidAI/LFM2-8B-A1B-GGUF", aliases=("lfm2",)),
    KnownModel(
        *("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 31.6, "unsloth/Nemotron-3-Nano-30B-A3B-GGUF"),
        aliases=("nemotron-3-nano", "nemotron-3-nano-30b"),
    ),
    KnownModel("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 8.9, aliases=("nemotron-nano-9b", "nemotron-nano-9b-v2")),
    KnownModel("CohereLabs/c4ai-command-r7b-12-2024", 8.0, aliases=("command-r7b",)),
    KnownModel("LGAI-EXAONE/EXAONE-4.0-1.2B", 1.3, "LGAI-EXAONE/EXAONE-4.0-1.2B-GGUF"),
    KnownModel("LGAI-EXAONE/EXAONE-4.0-32B", 32.0, "LGAI-EXAONE/EXAONE-4.0-32B-GGUF"),
    KnownModel("baidu/ERNIE-4.5-0.3B-PT", 0.36),
    KnownModel("baidu/ERNIE-4.5-21B-A3B-PT", 21.8, aliases=("ernie-4.5",)),
    KnownModel("tencent/Hunyuan-7B-Instruct", 7.5, aliases=("hunyuan",)),
    KnownModel("MiniMaxAI/MiniMax-M2", 228.7, "unsloth/MiniMax-M2-GGUF", 1.02),
    KnownModel("MiniMaxAI/MiniMax-M2.5", 228.7, "unsloth/MiniMax-M2.5-GGUF", 1.02),
    KnownModel("poolside/Laguna-XS.2", 33.4, aliases=("laguna",)),
    _unsloth("meta-models/Muse-Glimmer-30B", 29.6),
    KnownModel(
        *("JetBrains/Mellum2.1-12B-A2.5B-Thinking", 12.15, "JetBrains/Mellum2.1-12B-A2.5B-Thinking-GGUF"),
        aliases=("mellum",),
    ),
    KnownModel("JetBrains/Mellum2-12B-A2.5B-Instruct", 12.15),
    _unsloth("meta-llama/Llama-3.1-8B-Instruct", 8.0),
    _unsloth("meta-llama/Llama-3.2-1B-Instruct", 1.2),
    _unsloth("meta-llama/Llama-3.2-3B-Instruct", 3.2, "llama-3.2"),
    _unsloth("meta-llama/Llama-3.3-70B-Instruct", 70.6),
    _unsloth("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7.6, "deepseek-r1-7b"),
    _unsloth("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8.0, "deepseek-r1-8b", "deepseek-r1"),
    _unsloth("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", 14.8, "deepseek-r1-14b"),
    _unsloth("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32.8, "deepseek-r1-32b"),
    _unsloth("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", 70.6, "deepseek-r1-70b"),
    KnownModel("Qwen/Qwen3-Embedding-0.6B", 0.6),
    KnownModel("Qwen/Qwen3-Embedding-4B", 4.0),
    KnownModel("Qwen/Qwen3-Embedding-8B", 7.6),
    KnownModel("Qwen/Qwen3-Reranker-0.6B", 0.6),
    KnownModel("google/embeddinggemma-300m", 0.3),
    KnownModel("BAAI/bge-m3", 0.57),
    KnownModel("BAAI/bge-reranker-v2-m3", 0.57, aliases=("bge-reranker",)),
    KnownModel("nomic-ai/nomic-embed-text-v1.5", 0.14, bytes_per_weight=4.0),
    KnownModel("mixedbread-ai/mxbai-embed-large-v1", 0.34),
)

_EXACT: Final = {
    _squeezed(name): model for model in KNOWN_MODELS for name in (model.name, model.repository, *model.aliases)
}
_NAMES: Final = tuple(dict.fromkeys(name for model in KNOWN_MODELS for name in (model.name, *model.aliases)))
