"""The content of a model's text files, as a value that can be sent between processes."""

from __future__ import annotations

from dataclasses import dataclass

from cortex.neuron.pictures.spec import PictureSpec
from cortex.neuron.text.template.template_source import TemplateSources
from cortex.neuron.text.tokenizer.vocabulary import Vocabulary
from cortex.wire.node.load_options import SamplingDefaults


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Everything that a `TextModel` is built from, except its encoder."""

    vocabulary: Vocabulary
    templates: TemplateSources
    generation: SamplingDefaults
    pictures: PictureSpec | None = None
    """How the model takes pictures; None: it reads text only."""
