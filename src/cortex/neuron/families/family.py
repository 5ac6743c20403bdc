"""The descriptor of a model family: the names in its published files and in its models' output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from cortex.neuron.families.gguf import GGUFArchitecture
from cortex.neuron.families.splits import Split
from cortex.neuron.families.tool_calls import HERMES_JSON, ToolSyntax
from cortex.neuron.pictures.spec import PictureDefaults


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The markers that a model writes around its reasoning."""

    open: str
    close: str
    """Empty if the syntax of its calls has messages for reasoning."""
    follow: str = "\n\n"
    """Text between reasoning and response."""
    response_tags: tuple[str, str] | None = None
    """Tags around the response (`text/output/reasoning.py`)."""


THINK: Final = ReasoningMarkers("<think>", "</think>")
ADDRESSED: Final = ReasoningMarkers("to=self<|message|>", "<|eom|>", "<|start|>assistant")
"""The markers of models that address each message (`text/output/addressed.py`)."""
OTHER_MARKERS: Final = (
    ReasoningMarkers("<thinking>", "</thinking>"),
    ReasoningMarkers("<reasoning>", "</reasoning>"),
    ReasoningMarkers("<thought>", "</thought>"),
)
"""Markers of no family here."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Model types that differ only in sizes and options."""

    model_types: tuple[str, ...]
    """`model_type` of `config.json`. Architectures of GGUF files have the first."""
    models: str = ""
    """The published models, for the documentation."""
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of published tensor names → the layers' names. A part without a leading dot is a prefix. If two match at
    one place, the first applies."""
    tensor_prefix: str = ""
    """A pattern of the prefix of all names in models with a head, which `tensor_names` do not have."""
    experts: Literal["by_name", "interleaved", "by_columns"] = "by_name"
    """How experts are published: gate and up in turns, or each matrix by columns."""
    rotates_neighbours: bool = False
    """Whether pairs of adjacent dimensions rotate. Here the two halves of the rotated dimensions are pairs."""
    head_dim: int | None = None
    rotated_fraction: float = 1.0
    """Defaults of options that configs leave out."""
    tool_syntaxes: tuple[ToolSyntax, ...] = (HERMES_JSON,)
    """The syntaxes of its published models, for the documentation and tests; the chat template of a model decides.
    Models without one get Hermes JSON in their prompt."""
    reasoning: ReasoningMarkers | None = None
    pretokenizers: Mapping[str, Split] = field(default_factory=dict)
    """By `tokenizer.ggml.pre` of GGUF files."""
    gguf: tuple[GGUFArchitecture, ...] = ()
    also_gguf: tuple[str, ...] = ()
    """Architectures of other families whose files may have models of this one; their options say so."""
    pictures: PictureDefaults | None = None
    tower: str = ""
    """The kind of its vision tower: see `models/towers/families.py`."""
    projectors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """`projector_type` of GGUF towers → model types of the language models that such a tower makes this family of."""
    beside_tower: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _text: {}
    """Options that a language model gets in GGUF files with a tower."""
    is_encoder: bool = False
    pooling: Literal["", "mean", "last"] = ""
    """The pooling if files do not define one; empty if models generate text."""
    score_head: Literal["score", "pooler", "classifier", "normed"] = "score"
    """The layers of a rerank model's head."""
    may_rerank: bool = False
    """Whether its models may compare the logits of two tokens."""
    has_adapters: bool = False
    """Whether repositories have an adapter next to the weights."""
