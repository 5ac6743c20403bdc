"""Messages between the daemon and its survey process.

Facts travel as bytes, so that the daemon decodes them on a thread. They are values that the daemon only computes sizes
from: their number is limited, and no text of a file is parsed or compiled again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from cortex.ipc.channel import ChannelMessage
from cortex.neuron.kernels.float8.layout import FLOAT8_BLOCKS, FLOAT8_ROWS
from cortex.neuron.kernels.quantised.recipes import RECIPES, DeviceLayout
from cortex.neuron.layers.configs import Shard
from cortex.neuron.models.packing import STORED_LAYOUTS
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.node.loading.preflight import ModelFacts
from cortex.neuron.text.model import TextSurvey
from cortex.wire.errors import LoadFailed
from cortex.wire.node.protocol import Capabilities
from cortex.wire.node.sampling import SamplingDefaults
from cortex.wire.rejection import Rejected

MAX_REPLY_BYTES: Final = 48 << 20
MAX_CONFIG_BYTES: Final = 2 << 20
MAX_TENSORS: Final = 1 << 18
"""Of one form of a model. Far above every published model."""

_LAYOUTS: Final[tuple[DeviceLayout, ...]] = (*dict.fromkeys(STORED_LAYOUTS.values()), FLOAT8_BLOCKS, FLOAT8_ROWS)
_NUMBERS: Final = {layout: number for number, layout in enumerate(_LAYOUTS)}


class Find(ChannelMessage, frozen=True):
    """Asks where a model is, if all of it is on disk."""

    source: str
    cache: str
    quant: str | None


class Read(ChannelMessage, frozen=True):
    """Asks for what the files of a model say, and if its weights are dense, for what they would with each recipe."""

    path: str
    name: str
    quant: str | None
    num_ranks: int
    recipes: tuple[str, ...] = ()


class ReadText(ChannelMessage, frozen=True):
    """Asks for what the text files of a model say."""

    path: str
    name: str


class FoundAt(ChannelMessage, frozen=True):
    path: str | None


class FoundFacts(ChannelMessage, frozen=True):
    forms: bytes


class FoundText(ChannelMessage, frozen=True):
    capabilities: Capabilities
    generation: SamplingDefaults


Job = Find | Read | ReadText
Reply = FoundAt | FoundFacts | FoundText | Rejected


class _Form(msgspec.Struct, frozen=True, array_like=True):
    """The facts of a model in one form. Only the first one has a config."""

    config: str
    quant: str | None
    recipe: str | None
    formats: dict[str, str]
    packing: dict[str, int]


@dataclass(frozen=True, slots=True)
class FoundForms:
    """A model as it is stored, and as it would be if its dense weights were quantised at load, by recipe."""

    facts: ModelFacts
    quantised: dict[str, ModelFacts]


def pack_forms(forms: FoundForms) -> FoundFacts:
    """Raises LoadFailed for a model that describes more than any model has."""
    path = forms.facts.path
    config = json.dumps(dict(forms.facts.config))
    if len(config) > MAX_CONFIG_BYTES:
        raise LoadFailed(f"the config of {path} takes more than {MAX_CONFIG_BYTES >> 20} MiB; download the model again")
    packed = [_packed(forms.facts, config), *(_packed(facts, "") for facts in forms.quantised.values())]
    if any(max(len(form.formats), len(form.packing)) > MAX_TENSORS for form in packed):
        raise LoadFailed(f"{path} has more than {MAX_TENSORS} tensors; download the model again")
    encoded = msgspec.msgpack.encode(packed)
    if len(encoded) > MAX_REPLY_BYTES:
        raise LoadFailed(f"the tensors of {path} take more than {MAX_REPLY_BYTES >> 20} MiB to list; is it a model?")
    return FoundFacts(encoded)


def unpack_forms(found: FoundFacts, read: Read) -> FoundForms:
    stored, *quantised = msgspec.msgpack.decode(found.forms, type=list[_Form])
    raw: dict[str, Any] = json.loads(stored.config)
    architecture = read_architecture(raw)
    if read.num_ranks > 1:
        architecture = architecture.sharded(Shard(read.num_ranks - 1, read.num_ranks))

    def facts(form: _Form) -> ModelFacts:
        return ModelFacts(
            Path(read.path),
            architecture,
            form.quant,
            form.formats,
            {name: _LAYOUTS[number] for name, number in form.packing.items()},
            None if form.recipe is None else RECIPES[form.recipe],
            read.num_ranks,
            raw,
        )

    return FoundForms(facts(stored), {form.recipe: facts(form) for form in quantised if form.recipe is not None})


def pack_text(survey: TextSurvey) -> FoundText:
    return FoundText(survey.capabilities, survey.generation)


def unpack_text(found: FoundText) -> TextSurvey:
    return TextSurvey(found.capabilities, found.generation)


def _packed(facts: ModelFacts, config: str) -> _Form:
    packing = {name: _NUMBERS[layout] for name, layout in facts.packing.items()}
    recipe = None if facts.recipe is None else facts.recipe.name
    return _Form(config, facts.quant, recipe, dict(facts.formats), packing)
