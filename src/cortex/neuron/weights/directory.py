"""Access to a model directory: checks which files may be opened, and reads JSON files with a size limit.

The directory and the index that names its shards are untrusted. No file name may lead out of the directory. The only
exception is the layout of the hub cache, where `snapshots/<revision>/<file>` links to `blobs/<digest>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cortex.neuron.weights.errors import FilesMissing, Malformed

MAX_JSON_BYTES: Final = 32 << 20
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def model_file(directory: Path, name: str) -> Path:
    """The regular file `name` in `directory`; raises FilesMissing, or Malformed for a name that leads out of it."""
    if name != Path(name).name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        raise Malformed(f"{directory} refers to {name!r}, which is not a plain file name; do not trust this model")
    path = directory / name
    try:
        real = path.resolve(strict=True)
        root = directory.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise FilesMissing(f"{path} is missing; download the model again") from error
    if not (real.is_relative_to(root) or _is_own_blob(root, real)):
        raise Malformed(f"{path} links to {real}, outside the model's directory; copy the file instead")
    if not real.is_file():
        raise FilesMissing(f"{path} is not a regular file; download the model again")
    return path


def _is_own_blob(root: Path, real: Path) -> bool:
    """Whether `real` is a blob in the hub cache of snapshot `root`."""
    snapshots = next((parent for parent in (root, *root.parents) if parent.name == "snapshots"), None)
    return snapshots is not None and real.parent == snapshots.parent / "blobs"


def read_json(directory: Path, name: str) -> Mapping[str, Any]:
    """The JSON object in `directory`'s file `name`; raises FilesMissing or Malformed."""
    path = model_file(directory, name)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise FilesMissing(f"cannot read {path}: {error.strerror}; check its permissions") from error
    if len(raw) > MAX_JSON_BYTES:
        raise Malformed(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB; download it again")
    return parse_json_object(raw, path)


def parse_json_object(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse `raw`, the contents of `path`, as a JSON object; raises Malformed."""
    value = parse_json(raw, path)
    if not isinstance(value, dict):
        raise Malformed(f"{path} holds a JSON {type(value).__name__}, not an object; download it again")
    return value


def parse_json(raw: bytes, path: Path) -> Any:
    """Parse `raw`, the contents of `path`; raises Malformed."""
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
        if _SURROGATE.search(raw):
            # A lone surrogate cannot be encoded as UTF-8, so an error message that quotes it could not be sent.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{path} does not hold valid JSON ({str(error)[:80]}); download it again") from error
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key appears twice")
    return value
