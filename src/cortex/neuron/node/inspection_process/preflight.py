"""Checks before any memory is allocated: the files are complete, the family is supported, the quantisation is the
requested one. Reads headers only and imports no torch. `inspect` runs in the inspection process.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from cortex.formats.quant_names import plain
from cortex.neuron.engine.memory.dtypes import ITEM_BYTES
from cortex.neuron.engine.memory.plan import ModelSizes
from cortex.neuron.engine.memory.stages import most_stages
from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.kernels.quantised.layout import PUBLISHED_LAYOUTS
from cortex.neuron.kernels.quantised.recipes import RECIPES, Recipe, recipe_of
from cortex.neuron.layers.configs import Shard
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.host_division import LayerWeights, movable_layers
from cortex.neuron.models.packing import MatrixDevice, choose_layouts, with_draft_output
from cortex.neuron.models.pooling.config import PoolingConfig
from cortex.neuron.models.registry import check_draft, open_model
from cortex.neuron.models.sizes import WeightStorage, weight_bytes
from cortex.neuron.models.towers.config import PASS_PATCHES
from cortex.neuron.weights.checkpoint import Checkpoint, content_sample
from cortex.neuron.weights.errors import CheckpointError, Unsupported
from cortex.neuron.weights.hub.selection import gguf_of
from cortex.neuron.weights.sharded import ShardedCheckpoint
from cortex.neuron.weights.stored import TensorInfo
from cortex.wire.errors import FilesDamaged, LoadFailed, ModelUnsupported
from cortex.wire.node.protocol import StoredForm

_DENSE_FORMATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The metadata from a model's files."""

    path: Path
    architecture: Architecture
    quant: str | None = None
    """The format of most weights, unless they are dense."""
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    recipe: Recipe | None = None
    """How dense matrices are quantised at load, if configured."""
    num_ranks: int = 1
    """Number of devices that the model is divided among. If it is more than one, this is the metadata of one rank."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The source of `architecture`."""
    sample: str = ""
    """A digest of the content of the weights (`content_sample`)."""
    draft: ModelMetadata | None = None
    """The metadata of its draft model."""
    _layouts: dict[MatrixDevice, Mapping[str, MatrixLayout]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Cache of `storage`, whose choice takes milliseconds."""
    _sizes: dict[tuple[object, ...], ModelSizes] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of `sizes`, which takes a tenth of a second with many experts."""
    _described: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of `digest`, `file_bytes` and `stored`, which every poll of a node needs."""

    @property
    def family(self) -> str:
        return str(self.architecture.raw["model_type"])

    @property
    def context_tokens(self) -> int:
        return self.architecture.config.context_tokens

    @property
    def num_layers(self) -> int:
        return self.architecture.config.num_layers

    @property
    def most_stages(self) -> int:
        return most_stages(self.architecture)

    @property
    def backend(self) -> str:
        return self.architecture.backend

    @property
    def has_stages(self) -> bool:
        return self.architecture.has_stages

    @property
    def pooling(self) -> PoolingConfig | None:
        return self.architecture.pooling

    @property
    def digest(self) -> str:
        """Equal for the same model on different nodes: its configuration, how its tensors are stored, and a sample of
        their content."""
        if "digest" not in self._described:
            stored = ((name, info.dtype) for name, info in self.tensors.items())
            formats = sorted((name, dtype) for name, dtype in stored if dtype not in _DENSE_FORMATS)
            described = json.dumps([self.architecture.raw, formats, self.sample], sort_keys=True, default=str)
            self._described["digest"] = hashlib.sha256(described.encode()).hexdigest()
        return str(self._described["digest"])

    @property
    def file_bytes(self) -> int | None:
        """Bytes of its weights in its files; None for the metadata of one of several ranks."""
        if "file_bytes" not in self._described:
            whole = sum(tensor.num_bytes for tensor in self.tensors.values())
            self._described["file_bytes"] = whole if self.num_ranks == 1 else None
        num_bytes: int | None = self._described["file_bytes"]
        return num_bytes

    @property
    def stored(self) -> StoredForm:
        """The form of its files."""
        if "stored" not in self._described:
            elements = _elements(self.tensors)
            self._described["stored"] = StoredForm(
                file_format="gguf" if self.path.suffix == ".gguf" else "safetensors",
                dtype=_most(elements),
                num_parameters=sum(elements.values()) if self.num_ranks == 1 else None,
            )
        form: StoredForm = self._described["stored"]
        return form

    def with_head(self, name: str) -> ModelMetadata:
        """With the head that predicts further tokens. Raises ModelUnsupported if there is none."""
        try:
            return replace(self, architecture=self.architecture.with_head(self.tensors))
        except UnsupportedModel as error:
            raise ModelUnsupported(f"{name} cannot be loaded: {error}") from error

    def with_draft(self, draft: ModelMetadata, name: str) -> ModelMetadata:
        """With a draft model. Raises ModelUnsupported if it cannot serve as one."""
        try:
            check_draft(draft.architecture)
        except UnsupportedModel as error:
            raise ModelUnsupported(f"{name} cannot be loaded with its draft model: {error}") from error
        return replace(self, draft=draft)

    def storage(
        self,
        device: MatrixDevice,
        kv_item_bytes: int | None = None,
        pass_patches: int = PASS_PATCHES["cpu"],
    ) -> WeightStorage:
        """How the weights are stored on a device. `pass_patches`: picture patches per pass of its vision tower."""
        if device not in self._layouts:
            chosen: Mapping[str, MatrixLayout] = choose_layouts(device, self.tensors, self.recipe)
            self._layouts[device] = chosen if self.architecture.head is None else with_draft_output(device, chosen)
        layouts = self._layouts[device]
        return WeightStorage(ITEM_BYTES[device.dtype], layouts, kv_item_bytes, self.tensors, pass_patches)

    def sizes(
        self,
        device: MatrixDevice,
        kv_item_bytes: int | None,
        pass_patches: int,
        context_tokens: int | None,
        *,
        has_tower: bool = True,
    ) -> ModelSizes:
        """The sizes of its parts on a device. `has_tower`: its vision tower, if any, is loaded."""
        key = (device, kv_item_bytes, pass_patches, context_tokens, has_tower)
        if key not in self._sizes:
            architecture = self.architecture if has_tower else self.architecture.without_tower()
            storage = self.storage(device, kv_item_bytes, pass_patches)
            self._sizes[key] = ModelSizes.of(architecture, storage, context_tokens)
        return self._sizes[key]

    def movable(self, device: MatrixDevice) -> tuple[tuple[LayerWeights, ...], int]:
        """Its layers, as they can be divided between device and host, and the bytes of weights outside of them."""
        key = f"movable on {device}"
        if key not in self._described:
            storage = self.storage(device)
            layers = movable_layers(self.architecture, storage)
            inside = sum(layer.num_bytes for layer in layers)
            self._described[key] = layers, weight_bytes(self.architecture, storage) - inside
        found: tuple[tuple[LayerWeights, ...], int] = self._described[key]
        return found


def inspect(path: Path, quant: str | None = None, *, name: str | None = None, num_ranks: int = 1) -> ModelMetadata:
    """Reads the config and the headers of the files at `path`. With `quant`, quantised weights must be stored in that
    format, and dense ones are quantised to it at load.

    `name`: the model's name for messages, because a snapshot's folder is named by a digest. `num_ranks`: divides the
    model among this many devices; the metadata is that of the rank with the largest share. Raises FilesDamaged for
    damaged files, ModelUnsupported for a model that the engine cannot run.
    """
    name = name or path.name
    try:
        checkpoint, architecture = open_model(path)
    except CheckpointError as error:
        raise (ModelUnsupported if isinstance(error, Unsupported) else FilesDamaged)(str(error)) from error
    except UnsupportedModel as error:
        raise ModelUnsupported(f"{name} cannot be loaded: {error}") from error
    try:
        sample = content_sample(checkpoint)
        if num_ranks > 1:
            last = Shard(num_ranks - 1, num_ranks)  # parts that cannot be divided evenly are larger there
            whole, architecture = architecture, architecture.sharded(last)
            checkpoint = ShardedCheckpoint(checkpoint, whole.tensor_slices(last))
        return replace(_read_metadata(path, architecture, checkpoint, name, quant), sample=sample)
    except UnsupportedModel as error:
        raise ModelUnsupported(f"{name} cannot be loaded: {error}") from error
    except CheckpointError as error:
        if num_ranks == 1:
            raise FilesDamaged(f"{name} cannot be read: {error}") from error
        raise LoadFailed(f"{name} cannot be divided among {num_ranks} devices: {error}") from error
    finally:
        checkpoint.close()


_CHOICES: Final = ", ".join(f"{name} on GPUs" if name == "fp8" else name for name in RECIPES)


def objection(quant: str) -> str | None:
    """Why dense weights cannot be quantised as `quant` at load; None if they can, or may be published in it."""
    if recipe_of(quant) is not None or plain(quant) in PUBLISHED_LAYOUTS:
        return None
    return f"dense weights cannot be quantised as {quant} at load; choose one of {_CHOICES}"


def recipe_for(path: Path, stored: str, name: str, quant: str) -> Recipe | None:
    """How weights stored as `stored` are quantised at load; None if they are already quantised as `quant`.

    Raises ModelUnsupported for weights that are not and cannot be.
    """
    # The folder may name the format, as in Q8_0/model-00001-of-00002.gguf.
    if any(gguf_of([each], quant) for each in (f"{path.parent.name}/{path.name}", f"{stored}.gguf")):
        return None
    recipe = recipe_of(quant)
    if stored in _DENSE_FORMATS and recipe is not None:
        return recipe
    if stored in _DENSE_FORMATS:
        raise ModelUnsupported(
            f"{name} cannot be quantised as {quant} at load; choose one of {_CHOICES}, or name a GGUF of "
            f"{quant} as the source"
        )
    if recipe is not None and recipe == recipe_of(stored):
        return None
    other = "unquantised model" if stored in PUBLISHED_LAYOUTS else f"GGUF of {quant}, or the unquantised model,"
    raise ModelUnsupported(
        f"{name} is quantised as {stored.lower()}, not as {quant}; name the {other} as the source, or omit `quant`"
    )


def _read_metadata(
    path: Path, architecture: Architecture, checkpoint: Checkpoint, name: str, quant: str | None
) -> ModelMetadata:
    """Raises ModelUnsupported for weights that are not and cannot be quantised as `quant`."""
    tensors = checkpoint.tensors
    most = _most(_elements(tensors))
    recipe = recipe_for(path, most, name, quant) if quant is not None else None
    found = most.lower() if most not in _DENSE_FORMATS else recipe.name if recipe is not None else None
    num_ranks = architecture.shard.size
    return ModelMetadata(path, architecture, found, tensors, recipe, num_ranks, checkpoint.config)


def _elements(tensors: Mapping[str, TensorInfo]) -> Counter[str]:
    """The number of values in each stored format."""
    elements: Counter[str] = Counter()
    for tensor in tensors.values():
        elements[tensor.dtype] += math.prod(tensor.shape)
    return elements


def _most(elements: Counter[str]) -> str:
    return max(elements, key=lambda stored: elements[stored], default="F32")
