"""Which tensors of a checkpoint fill which parameters of the library's modules, and where in them.

Published checkpoints have names and shapes of their own time; the library knows how to convert them. Here its table of
conversions is read, not run: a tensor is copied to its place, which may be a part of a parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cortex.neuron.models.errors import UnsupportedModel
from cortex.neuron.private_api.transformers import renamed


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor of the checkpoint, and the conversion that puts it in its place; None: it is the whole parameter."""

    name: str
    conversion: Any = None
    pattern: str = ""


def sources_of(model: Any, names: Iterable[str], targets: Mapping[str, Tensor]) -> dict[str, list[TensorSource]]:
    """The tensors that fill each parameter. `names`: those of the checkpoint; `targets`: the model's parameters."""
    found: dict[str, list[TensorSource]] = defaultdict(list)
    for name, place in renamed(model, names, targets):
        found[place.target].append(TensorSource(name, place.conversion, place.pattern))
    return found


def places(target: str, destination: Tensor, sources: list[TensorSource]) -> list[tuple[str, Tensor]]:
    """The part of a parameter that each tensor fills. Raises UnsupportedModel for a conversion that is not a copy."""
    conversion = sources[0].conversion
    if conversion is None:
        if len(sources) > 1:
            raise UnsupportedModel(f"the checkpoint has {' and '.join(each.name for each in sources)} for {target}")
        return [(sources[0].name, destination)]
    by_pattern = {pattern: [each.name for each in sources if each.pattern == pattern] for pattern in _patterns(sources)}
    operations = [(type(each).__name__, getattr(each, "dim", None)) for each in conversion.operations]
    merges = ("MergeModulelist", 0)
    if merges in operations and any(len(names) != len(destination) for names in by_pattern.values()):
        counts = ", ".join(f"{len(names)} of {pattern}" for pattern, names in by_pattern.items())
        raise UnsupportedModel(f"{target} has {len(destination)} parts, but the checkpoint has {counts}")
    if operations == [merges] and len(by_pattern) == 1:
        (names,) = by_pattern.values()
        return list(zip(names, destination.unbind(0), strict=True))
    if operations == [merges, ("Concatenate", 1)]:
        parts = destination.chunk(len(by_pattern), dim=1)
        return [
            pair
            for names, part in zip(by_pattern.values(), parts, strict=True)
            for pair in zip(names, part.unbind(0), strict=True)
        ]
    if operations == [("Concatenate", 0)] and all(len(names) == 1 for names in by_pattern.values()):
        parts = destination.chunk(len(by_pattern), dim=0)
        return [(names[0], part) for names, part in zip(by_pattern.values(), parts, strict=True)]
    described = ", ".join(f"{name}({dim})" for name, dim in operations)
    raise UnsupportedModel(f"{target} is made of tensors of the checkpoint by {described}, which is not supported")


def _patterns(sources: list[TensorSource]) -> list[str]:
    """In the order in which the conversion joins them."""
    return [pattern for pattern in sources[0].conversion.source_patterns if any(s.pattern == pattern for s in sources)]
