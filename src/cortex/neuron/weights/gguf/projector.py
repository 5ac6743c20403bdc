"""The vision tower of a GGUF model: a file of its own next to the model's, whose name contains `mmproj`. Needs no
torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from cortex.neuron.families.registry import FAMILIES
from cortex.neuron.weights.gguf.metadata import GGUFFile
from cortex.neuron.weights.gguf.towers import projector_type, tower_options

_PREFERRED: Final = ("bf16", "f16", "f32")


def projector_of(model: Path) -> Path | None:
    """The file with the tower of the model in the file `model`; None: there is none. Repositories of the hub may have
    models in folders, and the tower above them."""
    folders = [model.parent]
    if model.parent.parent.parent.name == "snapshots":
        folders.append(model.parent.parent)
    for folder in folders:
        try:
            chosen = best_projector([path.name for path in folder.iterdir()], model.name)
        except OSError:
            return None
        if chosen is not None:
            return folder / chosen
    return None


def is_projector(path: str) -> bool:
    name = PurePosixPath(path).name.lower()
    return name.endswith(".gguf") and "mmproj" in name


def best_projector(paths: Iterable[str], model: str) -> str | None:
    """The tower's file among `paths` for the model in a file of this name: one whose name is most like the model's, as
    several models may be in one folder. Unquantised ones come first, those of 16 bits before those of 32."""
    words = _words(model)

    def rank(path: str) -> tuple[int, int, str]:
        name = PurePosixPath(path).name.lower()
        kind = next((number for number, each in enumerate(_PREFERRED) if each in name), len(_PREFERRED))
        return -len(words & _words(path)), kind, path

    return min((path for path in paths if is_projector(path) and path != model), key=rank, default=None)


def _words(path: str) -> set[str]:
    """The parts of a file's name that say which model it is of."""
    return set(re.split(r"[-_.]", PurePosixPath(path).name.lower())) - {"", "gguf", "mmproj", *_PREFERRED}


def whole_config(text: Mapping[str, Any], file: GGUFFile) -> dict[str, Any] | None:
    """The config of the model with its tower; None if the file is not the tower of such a model."""
    kind, model_type = projector_type(file) or "", str(text.get("model_type"))
    whole = next((family for family in FAMILIES if model_type in family.projectors.get(kind, ())), None)
    if whole is None or file.metadata.get("clip.vision.projection_dim") != text.get("hidden_size"):
        return None
    options = tower_options(file)
    if options is None:
        return None
    return {
        "model_type": whole.model_types[0],
        "text_config": {**text, **whole.beside_tower(text)},
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        **options,
    }


def picture_config(file: GGUFFile) -> dict[str, Any] | None:
    """What of the whole model's config says how pictures are prepared; None: the kind of the tower is not known."""
    kind = projector_type(file) or ""
    whole = next((family for family in FAMILIES if kind in family.projectors), None)
    options = tower_options(file)
    return None if whole is None or options is None else {"model_type": whole.model_types[0], **options}


def processor_config(file: GGUFFile) -> dict[str, Any]:
    """The settings of the image processor, in the hub's format; what the file leaves out is left out."""
    names = {"image_mean": "image_mean", "image_std": "image_std"}
    names |= {"image_min_pixels": "min_pixels", "image_max_pixels": "max_pixels"}
    found = {hub: file.metadata.get(f"clip.vision.{name}") for name, hub in names.items()}
    return {name: value for name, value in found.items() if value is not None}
