"""What a model's text files say, as a value that travels between processes."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.neuron.text.defaults import GenerationDefaults
from cortex.neuron.text.template.template_source import TemplateSources
from cortex.neuron.text.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TextFacts:
    """All that a `TextModel` is made of but its encoder."""

    vocabulary: Vocabulary
    templates: TemplateSources
    generation: GenerationDefaults
    has_vision: bool
    """There is a vision tower, which is not read."""
