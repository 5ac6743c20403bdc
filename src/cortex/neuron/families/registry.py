"""The families, by the names that files have for them. To add one, see docs/adding-a-model.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from cortex.neuron.families import splits, tool_calls
from cortex.neuron.families.descriptors import (
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
from cortex.neuron.families.family import OTHER_MARKERS, THINK, ModelFamily, ReasoningMarkers
from cortex.neuron.families.gguf import GGUFArchitecture
from cortex.neuron.families.splits import Split
from cortex.neuron.families.tool_calls import ToolSyntax

FAMILIES: Final[tuple[ModelFamily, ...]] = (
    *(*cohere.FAMILIES, *deepseek.FAMILIES, *encoders.FAMILIES, *gemma.FAMILIES),
    *(*glm.FAMILIES, *granite.FAMILIES, *lfm2.FAMILIES, *llama.FAMILIES, *mistral.FAMILIES),
    *(*mixtures.FAMILIES, *muse.FAMILIES, *nemotron.FAMILIES, *qwen.FAMILIES),
)


class FamilyArchitecture(NamedTuple):
    """An architecture of GGUF files, and the family of their models."""

    architecture: GGUFArchitecture
    family: ModelFamily


BY_TYPE: Final[Mapping[str, ModelFamily]] = {name: family for family in FAMILIES for name in family.model_types}
"""By the `model_type` of a config."""
GGUF: Final[Mapping[str, FamilyArchitecture]] = {
    architecture.name: FamilyArchitecture(architecture, family) for family in FAMILIES for architecture in family.gguf
}
"""By the `general.architecture` of a file."""
SYNTAXES: Final[Mapping[str, ToolSyntax]] = {
    syntax.name: syntax
    for syntax in (*tool_calls.OTHERS, *(syntax for family in FAMILIES for syntax in family.tool_syntaxes))
}
REASONING_MARKERS: Final[tuple[ReasoningMarkers, ...]] = tuple(
    dict.fromkeys(
        markers
        for markers in (THINK, *(family.reasoning for family in FAMILIES), *OTHER_MARKERS)
        if markers is not None and markers.close
    )
)
SPLITS: Final[Mapping[str, Split]] = {
    **splits.OTHERS,
    **{name: split for family in FAMILIES for name, split in family.pretokenizers.items()},
}
"""By the `tokenizer.ggml.pre` of GGUF files."""
_UNKNOWN: Final = ModelFamily(())


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a model's config; one without names of its own if it is not known."""
    model_type = config.get("model_type")
    return BY_TYPE.get(model_type, _UNKNOWN) if isinstance(model_type, str) else _UNKNOWN
