from __future__ import annotations

from pathlib import Path

import pytest

from cortex.cli.failures import CommandError, ExitCode
from cortex.cli.up.sources import ModelSource, parse_source


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
