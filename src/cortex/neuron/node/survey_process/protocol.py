"""Messages between the daemon and its survey process.

Facts travel as bytes, so that the daemon decodes them on a thread. They are values that the daemon only computes sizes
from: their number is limited, and no text of a file is parsed or compiled again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import msgspec

from cortex.ipc.channel import ChannelMessage
from cortex.neuron.kernels.quantised.recipes import RECIPES
from cortex.neuron.layers.configs import Shard
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.node.loading.preflight import ModelFacts
from cortex.neuron.text.model import TextSurvey
from cortex.neuron.weights.safetensors.arranged import expert_infos
from cortex.neuron.weights.stored import TensorInfo
from cortex.wire.errors import LoadFailed
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.protocol import Capabilities
from cortex.wire.rejection import Rejected

MAX_REPLY_BYTES: Final = 48 << 20
MAX_CONFIG_BYTES: Final = 2 << 20
MAX_TENSORS: Final = 1 << 18
"""Experts of a stack count one by one. Far above every published model."""


class Find(ChannelMessage, frozen=True):
    """Asks where a model is, if all of it is on disk."""

    source: str
    cache: str
    quant: str | None


class Read(ChannelMessage, frozen=True):
    """Asks for what the config and the headers of a model say."""

    path: str
    name: str
    quant: str | None
    num_ranks: int


class ReadText(ChannelMessage, frozen=True):
    """Asks for what the text files of a model say."""

    path: str
    name: str


class FoundAt(ChannelMessage, frozen=True):
    path: str | None


class FoundFacts(ChannelMessage, frozen=True):
    facts: bytes


class FoundText(ChannelMessage, frozen=True):
    capabilities: Capabilities
    generation: SamplingDefaults


Job = Find | Read | ReadText
Reply = FoundAt | FoundFacts | FoundText | Rejected


class _Facts(msgspec.Struct, frozen=True, array_like=True):
    config: str
    quant: str | None
    recipe: str | None
    tensors: dict[str, tuple[tuple[int, ...], str, int, tuple[int, int] | None]]
    """The members of each tensor's `TensorInfo`."""
    sample: str


def pack_facts(facts: ModelFacts) -> FoundFacts:
    """Raises LoadFailed for a model that describes more than any model has."""
    path = facts.path
    config = json.dumps(dict(facts.config))
    if len(config) > MAX_CONFIG_BYTES:
        raise LoadFailed(f"the config of {path} takes more than {MAX_CONFIG_BYTES >> 20} MiB; download the model again")
    tensors = facts.tensors
    if len(tensors) + sum(len(expert_infos(name, info)) for name, info in tensors.items()) > MAX_TENSORS:
        raise LoadFailed(f"{path} has more than {MAX_TENSORS} tensors; download the model again")
    members = {name: (info.shape, info.dtype, info.num_bytes, info.scaled) for name, info in tensors.items()}
    recipe = None if facts.recipe is None else facts.recipe.name
    encoded = msgspec.msgpack.encode(_Facts(config, facts.quant, recipe, members, facts.sample))
    if len(encoded) > MAX_REPLY_BYTES:
        raise LoadFailed(f"the tensors of {path} take more than {MAX_REPLY_BYTES >> 20} MiB to list; is it a model?")
    return FoundFacts(encoded)


def unpack_facts(found: FoundFacts, read: Read) -> ModelFacts:
    packed = msgspec.msgpack.decode(found.facts, type=_Facts)
    raw: dict[str, Any] = json.loads(packed.config)
    architecture = read_architecture(raw)
    if read.num_ranks > 1:
        architecture = architecture.sharded(Shard(read.num_ranks - 1, read.num_ranks))
    return ModelFacts(
        Path(read.path),
        architecture,
        packed.quant,
        {name: TensorInfo(*members) for name, members in packed.tensors.items()},
        None if packed.recipe is None else RECIPES[packed.recipe],
        read.num_ranks,
        raw,
        packed.sample,
    )


def pack_text(survey: TextSurvey) -> FoundText:
    return FoundText(survey.capabilities, survey.generation)


def unpack_text(found: FoundText) -> TextSurvey:
    return TextSurvey(found.capabilities, found.generation)
