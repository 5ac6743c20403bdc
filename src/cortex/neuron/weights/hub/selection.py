"""Selects the files of a repository that make up the requested model. Pure: names in, names out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from cortex.neuron.weights.errors import NotOnHub

SHARD: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_COMPANION: Final = re.compile(r"[^/]+\.(?:json|jinja)|merges\.txt|tokenizer\.model")
_GGUF_PART: Final = re.compile(r"(?P<stem>.*?)(?:-(?P<number>\d{5})-of-(?P<count>\d{5}))?\.gguf", re.IGNORECASE)
_BARE_BITS: Final = re.compile(r"(?:INT)?(\d)(?:[_-]?BITS?)?")
_QUANT: Final = re.compile(r"(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)+|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Selection:
    """The files of a model. `entry` is the one that a reader opens; None: it opens their directory."""

    paths: tuple[str, ...]
    entry: str | None


def select(repository: str, paths: Iterable[str], quant: str | None) -> Selection:
    """Select from `paths`. `quant` selects one of the GGUF models; dense weights are quantised as they are loaded.

    Raises NotOnHub with the alternatives.
    """
    paths = sorted(paths)
    models = _gguf_models(paths)
    weights = _safetensors(paths)
    if quant is not None and (models or not weights):
        return _gguf_selection(models[_label_for(repository, models, quant)])
    if weights:
        companions = [path for path in paths if _COMPANION.fullmatch(path)]
        return Selection((*companions, *weights), entry=None)
    if len(models) == 1:
        return _gguf_selection(next(iter(models.values())))
    if models:
        raise NotOnHub(f"{repository} holds several GGUF models; name one, such as {repository}:{_suggested(models)}")
    raise NotOnHub(f"{repository} has neither safetensors nor GGUF weights; choose a repository that has")


def variants(paths: Iterable[str]) -> dict[str | None, Selection]:
    """Every model that `select` could choose from `paths`, by the quantisation that chooses it; None: without one."""
    paths = sorted(paths)
    found: dict[str | None, Selection] = {}
    if _safetensors(paths):
        found[None] = select("", paths, None)
    for label, parts in _gguf_models(paths).items():
        found[label] = _gguf_selection(parts)
    return found


def missing_parts(selection: Selection) -> list[str]:
    """The parts of a split GGUF model, by its file names, that the selection lacks."""
    if selection.entry is None:
        return []
    match = _GGUF_PART.fullmatch(selection.entry)
    if match is None or match["count"] is None:
        return []
    named = [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1)]
    return [name for name in named if name not in selection.paths]


def _safetensors(paths: list[str]) -> list[str]:
    """The weights in the root directory: shards or the single file, but no other layouts of the same weights."""
    found = [path for path in paths if path.endswith(".safetensors") and "/" not in path]
    if "model.safetensors.index.json" in paths and (shards := [path for path in found if SHARD.fullmatch(path)]):
        return shards
    if "model.safetensors" in found:
        return ["model.safetensors"]
    return [path for path in found if not path.startswith("consolidated")]


def _gguf_models(paths: list[str]) -> dict[str, list[str]]:
    """The paths of each GGUF model, by its quantisation, or by its name where that has none."""
    models: dict[str, list[str]] = {}
    for path in paths:
        match = _GGUF_PART.fullmatch(path)
        if match is None or "mmproj" in path.lower() or "imatrix" in path.lower():
            continue
        labels = _QUANT.findall(match["stem"])
        models.setdefault(labels[-1].upper() if labels else match["stem"], []).append(path)
    return models


def _gguf_selection(paths: list[str]) -> Selection:
    return Selection(tuple(paths), entry=paths[0])


def _label_for(repository: str, models: dict[str, list[str]], quant: str) -> str:
    wanted = quant.upper()
    for label, paths in models.items():
        if wanted in (label.upper(), label.upper().removeprefix("UD-")) or quant in paths:
            return label
    if match := _BARE_BITS.fullmatch(wanted):  # `int8`, `8bit` and `8` are Q8
        wanted = f"Q{match[1]}"
    spelled = {re.sub(r"[^A-Z0-9]", "", label.upper()): label for label in models}
    for ending in ("", "KM", "KS", "K", "0"):  # `q6k` is Q6_K, and `q4` the recommended kind of four bits
        found = spelled.get(re.sub(r"[^A-Z0-9]", "", wanted) + ending)
        if found is not None:
            return found
    if not models:
        raise NotOnHub(f"{repository} has no weights, so no {quant}; choose a repository that has")
    near = min(models, key=lambda label: (abs(_bits(label) - _bits(wanted)), -_similarity(label, wanted)))
    raise NotOnHub(f"{repository} has no {quant}; the nearest is {repository}:{near} (there are {', '.join(models)})")


def _bits(label: str) -> int:
    digits = re.search(r"\d+", label)
    return int(digits[0]) if digits else 0


def _similarity(label: str, wanted: str) -> float:
    return difflib.SequenceMatcher(None, label.upper(), wanted).ratio()


def _suggested(models: dict[str, list[str]]) -> str:
    """The quantisation to suggest: the nearest to Q4_K_M."""
    return min(models, key=lambda label: (abs(_bits(label) - 4), -_similarity(label, "Q4_K_M")))
