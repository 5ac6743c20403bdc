from __future__ import annotations

from pathlib import Path

import pytest

from cortex.cli.failures import CommandError, ExitCode
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


def test_hub_id_is_its_own_source() -> None:
    assert parse_source("Qwen/Qwen3-0.6B") == ModelSource("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert parse_source("org/m-GGUF:Q4_K_M") == ModelSource("org/m-GGUF", "org/m-GGUF", "Q4_K_M")
    assert parse_source("org/m@v1.0:q8") == ModelSource("org/m", "org/m@v1.0", "q8")


def test_gguf_file_gives_its_name_to_the_model(tmp_path: Path) -> None:
    path = tmp_path / "Tiny.Q4_1.gguf"
    path.touch()
    assert parse_source(str(path)) == ModelSource("Tiny.Q4_1", str(path))


def test_model_directory_gives_its_name_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").touch()
    monkeypatch.chdir(folder)
    assert parse_source(".") == ModelSource("my-model", str(folder))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("./nowhere", "no model file or directory"),
        ("/nowhere/model.gguf", "no model file or directory"),
        ("model.gguf", "no model file or directory"),
        ("just-a-word", "neither a path nor a hub id"),
        ("gpt-os-20b", "did you mean gpt-oss-20b"),
        ("granite-4.0", "may be granite-4.0-micro"),
        ("a/b/c", "neither a path nor a hub id"),
        ("owner/", "neither a path nor a hub id"),
    ],
)
def test_rejects_text_that_cannot_be_a_model(text: str, complaint: str) -> None:
    with pytest.raises(CommandError, match=complaint) as failure:
        parse_source(text)
    assert failure.value.exit_code is ExitCode.USAGE


def test_error_of_a_gguf_directory_names_one_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(CommandError, match=r"name one of its files: .*a\.gguf"):
        parse_source(str(tmp_path))


def test_rejects_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.touch()
    with pytest.raises(CommandError, match="not a GGUF file"):
        parse_source(str(path))
