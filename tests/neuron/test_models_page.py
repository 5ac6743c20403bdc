"""docs/models.md is what the tables of the code say."""

from __future__ import annotations

from pathlib import Path

from cortex.neuron.families.registry import BY_TYPE
from cortex.neuron.models.registry import ENCODERS, FAMILIES
from cortex.neuron.models.transformers.library import COMPARED
from cortex.neuron.models_page import models_page

from .models.transformers_models import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_page_is_generated_from_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == models_page(), "run `make docs`"


def test_every_family_has_a_descriptor_and_an_architecture() -> None:
    assert BY_TYPE.keys() == {*FAMILIES, *ENCODERS}


def test_page_names_every_type_and_the_compared_ones_of_the_library() -> None:
    page = models_page()
    assert all(f"`{model_type}`" in page for model_type in FAMILIES)
    assert set(COMPARED) == set(TABLE)
    assert not set(COMPARED) & set(FAMILIES), "the native family would be compared"
