"""Finds a model's text files, and reads its small JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cortex.neuron.text.errors import TextFileMalformed


def gguf_file(path: Path) -> Path | None:
    """`path` itself if it is a file, or the GGUF file in a directory without `tokenizer.json`."""
    if not path.is_dir():
        return path
    if (path / "tokenizer.json").exists():
        return None
    return min(path.glob("*.gguf"), default=None)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, `{}` if there is no file; raises TextFileMalformed."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise TextFileMalformed(f"{path} is not JSON ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise TextFileMalformed(f"{path} is not a JSON object; download the model again")
    return content


def has_vision(directory: Path) -> bool:
    """Whether the model in `directory` has a vision tower; raises TextFileMalformed."""
    return "vision_config" in read_json(directory / "config.json")
