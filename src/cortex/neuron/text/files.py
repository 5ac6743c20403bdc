"""Where a model's text files are, and its small JSON files read with care."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cortex.neuron.text.errors import TextFileMalformed


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is or, where a directory has no `tokenizer.json`, that it holds."""
    if not path.is_dir():
        return path
    if (path / "tokenizer.json").exists():
        return None
    return min(path.glob("*.gguf"), default=None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, `{}` when the file is absent; raises TextFileMalformed."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise TextFileMalformed(f"{path} is not JSON ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise TextFileMalformed(f"{path} holds no JSON object; download the model again")
    return content


def has_vision(directory: Path) -> bool:
    """Whether the model in `directory` has a vision tower; raises TextFileMalformed."""
    return "vision_config" in read_json(directory / "config.json")
