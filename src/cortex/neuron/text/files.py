"""Finds a model's text files, and reads its small JSON files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cortex.neuron.families.registry import family_of
from cortex.neuron.pictures.spec import PROCESSOR_FILES, PictureSpec, image_processor_in, read_picture_spec
from cortex.neuron.text.errors import TextFileMalformed, TokenizerMissing
from cortex.neuron.weights.gguf.metadata import read_metadata
from cortex.neuron.weights.gguf.towers import picture_config, processor_config, projector_of

TEKKEN: Final = "tekken.json"
"""The tokenizer of Mistral's own library, which some of its repositories have in place of `tokenizer.json`."""
MAX_JSON_BYTES: Final = 16 << 20
MAX_TEMPLATE_BYTES: Final = 1 << 20
MAX_TOKENIZER_BYTES: Final = 128 << 20


def gguf_file(path: Path) -> Path | None:
    """`path` itself if it is a file, or the GGUF file in a directory without `tokenizer.json`."""
    if not path.is_dir():
        return path
    if (path / "tokenizer.json").exists():
        return None
    models = (file for file in path.glob("*.gguf") if "mmproj" not in file.name.lower())
    return min(models, default=None)


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file, `{}` if there is no file; raises TextFileMalformed."""
    try:
        content = json.loads(read_limited(path, max_bytes))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise TextFileMalformed(f"{path} is not JSON ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise TextFileMalformed(f"{path} is not a JSON object; download the model again")
    return content


def read_limited(path: Path, max_bytes: int) -> bytes:
    """The content of a file; raises OSError, or TextFileMalformed for one that is too large for its purpose."""
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise TextFileMalformed(f"{path} is larger than {max_bytes >> 20} MiB; download the model again")
    return content


def _gguf_picture_spec(model: Path) -> PictureSpec | None:
    """Raises CheckpointError, or TextFileMalformed."""
    if (projector := projector_of(model)) is None:
        return None
    file = read_metadata(projector)
    if (config := picture_config(file)) is None:
        return None
    try:
        return read_picture_spec(family_of(config).pictures, config, processor_config(file))
    except ValueError as error:
        raise TextFileMalformed(f"the image processor of {projector} cannot be used: {error}") from error


def tokenizer_file(directory: Path) -> Path:
    """Raises TokenizerMissing."""
    for name in ("tokenizer.json", TEKKEN):
        if (directory / name).exists():
            return directory / name
    raise TokenizerMissing(
        f"{directory} has no tokenizer.json; download the whole repository, or save the tokenizer in the fast format"
    )


def token_search(directory: Path) -> Callable[[str], bool]:
    """Whether a text is one token, without a tokenizer: its file then contains the text in quotes. Raises
    TokenizerMissing, or TextFileMalformed for a file that is cut off."""
    file = tokenizer_file(directory)
    content = read_limited(file, MAX_TOKENIZER_BYTES)
    if not content.rstrip().endswith(b"}"):
        raise TextFileMalformed(f"{file} is cut off after {len(content)} bytes; download the model again")

    def is_token(text: str) -> bool:
        return json.dumps(text).encode() in content or json.dumps(text, ensure_ascii=False).encode() in content

    return is_token


def picture_spec(directory: Path) -> PictureSpec | None:
    """How the model in `directory` takes pictures; None if it takes none. Raises TextFileMalformed."""
    if (gguf := gguf_file(directory)) is not None:
        return _gguf_picture_spec(gguf)
    processors = {name: read_json(directory / name) for name in PROCESSOR_FILES}
    try:
        config = read_json(directory / "config.json")
        return read_picture_spec(family_of(config).pictures, config, image_processor_in(processors))
    except ValueError as error:
        raise TextFileMalformed(f"the image processor of {directory} cannot be used: {error}") from error
