"""docs/models.md is what the tables of the code say."""

from __future__ import annotations

from pathlib import Path

from cortex.neuron.models.registry import FAMILIES
from cortex.neuron.models.transformers.library import COMPARED
from cortex.neuron.models_page import models_page
from cortex.neuron.text.output.detect import REASONING_MARKERS
from cortex.neuron.text.output.family_syntaxes import FAMILY_SYNTAXES

from .models.transformers_models import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_page_is_generated_from_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == models_page(), "run `make docs`"


def test_every_family_says_what_its_models_write() -> None:
    assert FAMILY_SYNTAXES.keys() == FAMILIES.keys()
    opened = {markers.open for markers in REASONING_MARKERS} | {"", "<|channel|>analysis"}
    assert {syntax.reasoning for syntax in FAMILY_SYNTAXES.values()} <= opened


def test_page_names_every_type_and_the_compared_ones_of_the_library() -> None:
    page = models_page()
    assert all(f"`{model_type}`" in page for model_type in FAMILIES)
    assert set(COMPARED) == set(TABLE)
    assert not set(COMPARED) & set(FAMILIES), "the native family would be compared"
