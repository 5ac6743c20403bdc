"""Selects the files of a repository that make up the requested model. Pure: names in, names out."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from cortex.formats.quant_names import bits, label_in, meanings, plain
from cortex.neuron.weights.errors import NotOnHub
from cortex.neuron.weights.gguf.towers import best_projector, is_projector

SHARD: Final = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
COMPANION: Final = re.compile(
    r"[^/]+\.(?:json|jinja)|merges\.txt|tokenizer\.model|\d+_[A-Za-z]+/(?:config\.json|model\.safetensors)"
    r"|adapters/retrieval/adapter_(?:config\.json|model\.safetensors)"
)
"""Files besides the weights: also those of the modules after the pooling, each in a folder of its own, and those of the
adapter that `adapter.py` reads."""
_GGUF_PART: Final = re.compile(r"(?P<stem>.*?)(?:-(?P<number>\d{5})-of-(?P<count>\d{5}))?\.gguf", re.IGNORECASE)

Objection = Callable[[str], str | None]
"""A quantisation → why dense weights cannot be quantised so at load; None: they can."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The files of a model. `entry` is the one that a reader opens; None: it opens their directory."""

    paths: tuple[str, ...]
    entry: str | None


def select(
    repository: str,
    paths: Iterable[str],
    quant: str | None,
    *,
    objection: Objection = lambda _: None,
) -> Selection:
    """Select from `paths`. With `quant`, a GGUF model of it, in any spelling; where there is none, the dense weights,
    which are quantised as they are loaded.

    Raises NotOnHub with the alternatives.
    """
    paths = sorted(paths)
    models = _gguf_models(paths)
    weights = _safetensors(paths)
    if quant is not None:
        label = _label_for(models, quant)
        if label is not None:
            return _gguf_selection(models[label], paths)
        _reject_unless_quantised_at_load(repository, models, weights, quant, objection)
    if weights:
        companions = [path for path in paths if COMPANION.fullmatch(path)]
        return Selection((*companions, *weights), entry=None)
    if len(models) == 1:
        return _gguf_selection(next(iter(models.values())), paths)
    if models:
        raise NotOnHub(
            f"{repository} holds several GGUF models; name one, such as {repository}:{_nearest(models, 'Q4_K_M')}"
        )
    raise NotOnHub(f"{repository} has neither safetensors nor GGUF weights; choose a repository that has")


def gguf_of(paths: Iterable[str], quant: str) -> str | None:
    """The GGUF file among `paths` whose name says that it is quantised as `quant`, in any spelling."""
    models = _gguf_models(sorted(paths))
    label = _label_for(models, quant)
    return None if label is None else models[label][0]


def variants(paths: Iterable[str]) -> dict[str | None, Selection]:
    """Every model that `select` could choose from `paths`, by the quantisation that chooses it; None: without one."""
    paths = sorted(paths)
    found: dict[str | None, Selection] = {}
    if _safetensors(paths):
        found[None] = select("", paths, None)
    for label, parts in _gguf_models(paths).items():
        found[label] = _gguf_selection(parts, paths)
    return found


def missing_parts(selection: Selection) -> list[str]:
    """The parts of a split GGUF model, by its file names, that the selection lacks."""
    if selection.entry is None:
        return []
    return [name for name in parts_of(selection.entry) if name not in selection.paths]


def parts_of(name: str) -> list[str]:
    """The names of all parts of a GGUF model of which one is called `name`."""
    match = _GGUF_PART.fullmatch(name)
    if match is None or match["count"] is None:
        return [name]
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in range(1, int(match["count"]) + 1)]


def _safetensors(paths: list[str]) -> list[str]:
    """The weights in the root directory: shards or the single file, but no other layouts of the same weights."""
    found = [path for path in paths if path.endswith(".safetensors") and "/" not in path]
    if "model.safetensors.index.json" in paths and (shards := [path for path in found if SHARD.fullmatch(path)]):
        return shards
    if "model.safetensors" in found:
        return ["model.safetensors"]
    return [path for path in found if not path.startswith("consolidated")]


def _gguf_models(paths: list[str]) -> dict[str, list[str]]:
    """The paths of each GGUF model, by its quantisation, or by its name where that has none or others have the same."""
    parts: dict[str, list[str]] = {}
    for path in paths:
        match = _GGUF_PART.fullmatch(path)
        if match is not None and not is_projector(path) and "imatrix" not in path.lower():
            parts.setdefault(match["stem"], []).append(path)
    labels = {stem: label_in(stem) or stem for stem in parts}
    shared = Counter(labels.values())
    return {label if shared[label] == 1 else stem: parts[stem] for stem, label in labels.items()}


def _gguf_selection(parts: list[str], paths: list[str]) -> Selection:
    """A GGUF model with the file of its vision tower, which is in its folder, or above it."""
    entry = PurePosixPath(parts[0])
    for folder in entry.parents:
        tower = best_projector((path for path in paths if PurePosixPath(path).parent == folder), entry.name)
        if tower is not None:
            return Selection((*parts, tower), entry=parts[0])
    return Selection(tuple(parts), entry=parts[0])


def _label_for(models: dict[str, list[str]], quant: str) -> str | None:
    """The model that is quantised as `quant`: of that very name, else the first of those that the spelling can mean."""
    for label, paths in models.items():
        if quant in (label, *paths):
            return label
    spelled = {plain(label): label for label in reversed(models)}
    return next((spelled[name] for name in meanings(quant) if name in spelled), None)


def _reject_unless_quantised_at_load(
    repository: str,
    models: dict[str, list[str]],
    weights: list[str],
    quant: str,
    objection: Objection,
) -> None:
    """Raises NotOnHub unless there are dense weights to quantise, and no GGUF model that could be meant instead."""
    is_ambiguous = any(gguf_of([path], quant) for paths in models.values() for path in paths)
    problem = objection(quant) if weights else None
    if weights and problem is None and not is_ambiguous:
        return
    if not models and not weights:
        raise NotOnHub(f"{repository} has no weights, so no {quant}; choose a repository that has")
    reason = f"{repository} has no {quant}" if problem is None else f"{repository} has no {quant}, and {problem}"
    if is_ambiguous:
        reason = f"{repository} has several models in {quant}"
    if models:
        reason += f"; the nearest is {repository}:{_nearest(models, quant.upper())} (there are {', '.join(models)})"
    raise NotOnHub(reason)


def _nearest(models: dict[str, list[str]], wanted: str) -> str:
    """The quantisation to suggest instead: of similar bits, of the same kind, and then with the most similar name."""

    def distance(label: str) -> tuple[int, bool, float]:
        similarity = difflib.SequenceMatcher(None, label.upper(), wanted).ratio()
        return abs(bits(label) - bits(wanted)), label[0] != wanted[:1], -similarity

    return min(models, key=distance)
