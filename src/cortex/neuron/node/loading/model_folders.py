"""The folders of `model_dirs`: every GGUF file and every checkpoint in them is a model of the node."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_DEPTH = 4
MAX_FOUND = 1000
"""Models of one folder. More are left out: such a folder is not one of models."""
SETTLE_S = 5.0
"""Files that changed within this time may still be copied."""
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_NOT_MODELS = ("mmproj", "imatrix")


def scan_folders(folders: Sequence[Path]) -> dict[str, Path]:
    """The models in `folders` by id: the path of the GGUF file without its suffix, or of the checkpoint's directory,
    relative to the folder. Of two with one id the first counts. Blocks; reads directories only."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in _models_in(folder.expanduser()):
            found.setdefault(_id_of(path, folder.expanduser()), path)
    return found


def _models_in(folder: Path) -> Iterator[Path]:
    newest_s = time.time() - SETTLE_S
    num_found = 0
    for place, directories, names in os.walk(folder):
        here = Path(place)
        if len(here.relative_to(folder).parts) >= MAX_DEPTH:
            directories.clear()
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            directories.clear()
            paths = [here] if all(_is_settled(here / name, newest_s) for name in names) else []
        else:
            paths = [here / name for name in sorted(names) if _is_model(name) and _is_settled(here / name, newest_s)]
        for path in paths:
            num_found += 1
            if num_found > MAX_FOUND:
                return
            yield path


def _is_model(name: str) -> bool:
    """Whether it is a GGUF file, the first one if the model is divided among several."""
    if not name.endswith(".gguf") or any(word in name.lower() for word in _NOT_MODELS):
        return False
    part = _PART.search(name.removesuffix(".gguf"))
    return part is None or int(part[1]) == 1


def _is_settled(path: Path, newest_s: float) -> bool:
    try:
        return path.stat().st_mtime <= newest_s
    except OSError:  # gone, or a link to nowhere
        return False


def _id_of(path: Path, folder: Path) -> str:
    relative = path.relative_to(folder)
    if not relative.parts:
        return folder.name
    return _PART.sub("", relative.as_posix().removesuffix(".gguf"))
