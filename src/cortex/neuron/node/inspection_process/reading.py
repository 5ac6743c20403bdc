"""Reads the files of models: the functions of the inspection process, and how metadata travels from it to the
daemon.

The functions block, and may take any time and memory, because the files are not trusted. Facts travel as bytes, so that
the daemon decodes them on a thread. The daemon only computes sizes from them: their number is limited, and no text of a
file is parsed or compiled again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from cortex.neuron.hub_process.resolver import resolve
from cortex.neuron.kernels.quantised.recipes import RECIPES
from cortex.neuron.layers.configs import Shard
from cortex.neuron.models.registry import read_architecture
from cortex.neuron.node.inspection_process.preflight import ModelMetadata, inspect, objection
from cortex.neuron.text.model import TextInspection, inspect_text
from cortex.neuron.tokenizer_process.client import UNREADABLE, load_error
from cortex.neuron.weights.errors import CheckpointError, Malformed
from cortex.neuron.weights.safetensors.arranged import expert_infos
from cortex.neuron.weights.stored import TensorInfo
from cortex.wire.errors import CortexError, FilesDamaged, LoadFailed

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

MAX_REPLY_BYTES: Final = 48 << 20
MAX_CONFIG_BYTES: Final = 2 << 20
MAX_TENSORS: Final = 1 << 18
"""Counts each expert of a stack. Far above every published model."""


class Read(msgspec.Struct, frozen=True):
    """A model whose config and headers are to be read."""

    path: str
    name: str
    quant: str | None
    num_ranks: int


def functions() -> dict[str, Callable[..., Any]]:
    return {each.__name__: _reporting(each) for each in (find_local, read, read_text)}


def find_local(source: str, cache: str, quant: str | None) -> str | None:
    """The local path of `source` when the whole model is on disk; never uses the network. Raises FilesDamaged for
    one that is on disk and damaged."""
    try:
        path = resolve(
            source,
            quant=quant,
            objection=objection,
            cache_dir=Path(cache),
            offline=True,
            progress=lambda *_: None,
            cancelled=lambda: False,
        )
    except Malformed as error:
        raise FilesDamaged(
            f"{source} is damaged: {error}; delete its files (POST /files/delete) and load it again, which downloads it"
        ) from error
    except CheckpointError:
        return None
    return str(path)


def read(asked: Read) -> bytes:
    """The metadata from config and headers of a model, packed; the daemon decodes it on a thread."""
    return pack_metadata(read_metadata_of(asked))


def read_text(path: str, name: str, chat_template: str | None) -> TextInspection:
    """The metadata from a model's text files, with `chat_template` instead of theirs."""
    try:
        return inspect_text(Path(path), chat_template)
    except UNREADABLE as error:
        raise load_error(f"{name}: its text files cannot be read", error) from error


def read_metadata_of(asked: Read) -> ModelMetadata:
    """Raises LoadFailed."""
    return inspect(Path(asked.path), asked.quant, name=asked.name, num_ranks=asked.num_ranks)


def _reporting(function: F) -> F:
    """`function`, with every exception turned into LoadFailed, which reaches the daemon."""

    @wraps(function)
    def reporting(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (CortexError, MemoryError):
            raise
        except Exception as error:
            log.warning("cannot read the files of a model", exc_info=True)
            raise LoadFailed(f"its files cannot be read: {type(error).__name__}: {str(error)[:200]}") from error

    return reporting  # type: ignore[return-value]


class _PackedMetadata(msgspec.Struct, frozen=True, array_like=True):
    config: str
    quant: str | None
    recipe: str | None
    tensors: dict[str, tuple[tuple[int, ...], str, int, tuple[int, int] | None]]
    """The members of each tensor's `TensorInfo`."""
    sample: str


def pack_metadata(metadata: ModelMetadata) -> bytes:
    """Raises LoadFailed for a model with implausibly many tensors."""
    path = metadata.path
    config = json.dumps(dict(metadata.config))
    if len(config) > MAX_CONFIG_BYTES:
        raise LoadFailed(f"the config of {path} takes more than {MAX_CONFIG_BYTES >> 20} MiB; download the model again")
    tensors = metadata.tensors
    if len(tensors) + sum(len(expert_infos(name, info)) for name, info in tensors.items()) > MAX_TENSORS:
        raise LoadFailed(f"{path} has more than {MAX_TENSORS} tensors; download the model again")
    members = {name: (info.shape, info.dtype, info.num_bytes, info.scaled) for name, info in tensors.items()}
    recipe = None if metadata.recipe is None else metadata.recipe.name
    encoded = msgspec.msgpack.encode(_PackedMetadata(config, metadata.quant, recipe, members, metadata.sample))
    if len(encoded) > MAX_REPLY_BYTES:
        raise LoadFailed(f"the tensors of {path} take more than {MAX_REPLY_BYTES >> 20} MiB to list; is it a model?")
    return encoded


def unpack_metadata(metadata: bytes, read: Read) -> ModelMetadata:
    packed = msgspec.msgpack.decode(metadata, type=_PackedMetadata)
    raw: dict[str, Any] = json.loads(packed.config)
    architecture = read_architecture(raw)
    if read.num_ranks > 1:
        architecture = architecture.sharded(Shard(read.num_ranks - 1, read.num_ranks))
    return ModelMetadata(
        Path(read.path),
        architecture,
        packed.quant,
        {name: TensorInfo(*members) for name, members in packed.tensors.items()},
        None if packed.recipe is None else RECIPES[packed.recipe],
        read.num_ranks,
        raw,
        packed.sample,
    )
