"""What the published models of each family write: for the documentation, and for the tests that hold it against their
chat templates. A model's own template decides when it runs (`detect.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from cortex.neuron.text.output.detect import ToolSyntax as S


class FamilySyntax(NamedTuple):
    tools: tuple[S, ...] = (S.HERMES_JSON,)
    """Without a syntax of their own, models get Hermes JSON described."""
    reasoning: str = ""
    """The marker that begins reasoning; empty for families that do not reason."""


_QWEN35: Final = FamilySyntax((S.QWEN_XML,), "<think>")
_GEMMA4: Final = FamilySyntax((S.GEMMA,), "<|channel>thought")
_MISTRAL: Final = FamilySyntax((S.MISTRAL, S.MISTRAL_JSON), "[THINK]")
_MUSE: Final = FamilySyntax((S.MUSE_XML,), "to=self<|message|>")
_DEEPSEEK: Final = FamilySyntax((S.DEEPSEEK, S.DEEPSEEK_BLOCK), "<think>")
_GLM: Final = FamilySyntax((S.GLM_XML,), "<think>")

FAMILY_SYNTAXES: Final[Mapping[str, FamilySyntax]] = {
    "cohere2": FamilySyntax((S.COHERE_JSON,), "<|START_THINKING|>"),
    "deepseek_v2": FamilySyntax(),
    "deepseek_v3": _DEEPSEEK,
    "ernie4_5": FamilySyntax(),
    "ernie4_5_moe": FamilySyntax(reasoning="<think>"),
    "exaone4": FamilySyntax(reasoning="<think>"),
    "gemma3": FamilySyntax(),
    "gemma3_text": FamilySyntax(),
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm4": FamilySyntax((S.NAME_LINE,), "<think>"),
    "glm4_moe": _GLM,
    "glm4_moe_lite": _GLM,
    "gpt_oss": FamilySyntax((S.HARMONY,), "<|channel|>analysis"),
    "granite": FamilySyntax((S.GRANITE_JSON, S.HERMES_JSON), "<think>"),
    "granitemoehybrid": FamilySyntax(),
    "hunyuan_v1_dense": FamilySyntax((S.HUNYUAN_JSON,), "<think>"),
    "kimi_k2": FamilySyntax((S.KIMI,), "<think>"),
    "laguna": _GLM,
    "lfm2": FamilySyntax((S.LFM2,), "<think>"),
    "lfm2_moe": FamilySyntax((S.LFM2,), "<think>"),
    "llama": FamilySyntax((S.LLAMA_JSON, S.HERMES_JSON), "<think>"),
    "mellum": FamilySyntax(),
    "minimax_m2": FamilySyntax((S.MINIMAX_XML,), "<think>"),
    "ministral3": _MISTRAL,
    "mistral": _MISTRAL,
    "mistral3": _MISTRAL,
    "muse_glimmer": _MUSE,
    "muse_glimmer_text": _MUSE,
    "nemotron_h": FamilySyntax((S.QWEN_XML, S.NEMOTRON_JSON), "<think>"),
    "olmo2": FamilySyntax(),
    "olmo3": FamilySyntax((S.OLMO,), "<think>"),
    "phi3": FamilySyntax((S.PHI_JSON, S.HERMES_JSON), "<think>"),
    "qwen2": FamilySyntax(reasoning="<think>"),
    "qwen3": FamilySyntax(reasoning="<think>"),
    "qwen3_moe": FamilySyntax((S.HERMES_JSON, S.QWEN_XML), "<think>"),
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35,
    "qwen3_5_moe_text": _QWEN35,
    "qwen3_5_text": _QWEN35,
    "qwen3_vl": FamilySyntax(reasoning="<think>"),
    "qwen3_vl_moe": FamilySyntax(reasoning="<think>"),
    "qwen3_next": FamilySyntax(reasoning="<think>"),
    "seed_oss": FamilySyntax((S.SEED_XML,), "<seed:think>"),
    "smollm3": FamilySyntax(reasoning="<think>"),
    "youtu": FamilySyntax(),
}
