from __future__ import annotations

import pytest

from cortex.cli.up.command import chosen
from cortex.cli.up.sources import ModelSource, NamedModel, parse_source
from cortex.fleet.known_models import known_model

GB = 10**9


@pytest.mark.parametrize(
    ("name", "quant", "free_gb", "expected"),
    [
        ("qwen3-8b", None, 24, ModelSource("qwen3-8b", "Qwen/Qwen3-8B")),
        ("qwen3-8b", None, 16, ModelSource("qwen3-8b", "unsloth/Qwen3-8B-GGUF", "Q8_0")),
        ("qwen3-8b", None, 8, ModelSource("qwen3-8b", "unsloth/Qwen3-8B-GGUF", "Q5_K_M")),
        ("qwen3-8b", None, 1, ModelSource("qwen3-8b", "unsloth/Qwen3-8B-GGUF", "Q4_K_M")),
        ("qwen3-8b", "q6", 80, ModelSource("qwen3-8b", "unsloth/Qwen3-8B-GGUF", "q6")),
        ("gpt-oss-20b", None, 24, ModelSource("gpt-oss-20b", "openai/gpt-oss-20b")),
        ("hunyuan", None, 10, ModelSource("hunyuan-7b", "tencent/Hunyuan-7B-Instruct", "Q6_K")),
    ],
)
def test_a_known_model_is_taken_in_the_best_format_that_fits(
    name: str, quant: str | None, free_gb: int, expected: ModelSource
) -> None:
    model = known_model(name)
    assert model is not None
    assert chosen(model, quant, free_gb * GB) == expected


def test_a_name_may_say_its_format() -> None:
    named = parse_source("qwen3-8b:q4_k_m")
    assert isinstance(named, NamedModel)
    assert (named.model.repository, named.quant) == ("Qwen/Qwen3-8B", "q4_k_m")
    sized = parse_source("qwen3:8b")
    assert isinstance(sized, NamedModel)
    assert (sized.model.repository, sized.quant) == ("Qwen/Qwen3-8B", None)
