import pytest

from cortex.neuron.kernels.quantised.layout import Q4, Q6
from cortex.neuron.kernels.quantised.recipes import recipe_of


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("q4", "q4_k"),
        ("Q4_K_M", "q4_k"),
        ("q4_k", "q4_k"),
        ("int4", "q4_k"),
        ("q4_0", "q4_k"),
        ("q5_k_s", "q5_k"),
        ("q6k", "q6_k"),
        ("Q6_K", "q6_k"),
        ("int8", "q8_0"),
        ("Q8_0", "q8_0"),
        ("8bit", "q8_0"),
        (" q8 ", "q8_0"),
        ("FP8", "fp8"),
    ],
)
def test_every_usual_spelling_names_a_recipe(spelling: str, name: str) -> None:
    recipe = recipe_of(spelling)
    assert recipe is not None
    assert recipe.name == name


@pytest.mark.parametrize("spelling", ["", "q", "q7", "fp4", "awq", "q44", "4x", "iq4_xs"])
def test_other_spellings_name_none(spelling: str) -> None:
    assert recipe_of(spelling) is None


def test_embedding_and_head_get_more_bits_than_the_layers() -> None:
    recipe = recipe_of("q4")
    assert recipe is not None
    assert recipe.layout_of("model.layers.0.mlp.up_proj.weight") == Q4
    assert recipe.layout_of("model.embed_tokens.weight") == Q6
    assert recipe.layout_of("lm_head.weight") == Q6
