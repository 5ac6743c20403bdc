"""A model of the library as the engine sees it: its modules, on memory that the engine plans, fills and empties."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.matrix import Matrix
from cortex.neuron.layers.attention import CachedAttention
from cortex.neuron.layers.configs import AttentionConfig
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.rope import RopeTables
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.transformers.architecture import TransformersArchitecture
from cortex.neuron.models.transformers.network import (
    CurrentStep,
    GivenHidden,
    MatrixLinear,
    Network,
    PagedAttention,
    RowParallelMatrixLinear,
    replace_module,
)
from cortex.neuron.private_api.torch import with_child
from cortex.neuron.private_api.transformers import exact_modules, initialise, renamed
from cortex.neuron.weights.stored import TensorInfo


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


_FILLED_LATER: Final = float("nan")
_MAX_BUFFER_BYTES: Final = 256 << 20
"""The largest table that a module may compute, which the plan of the device's memory does not count."""


class TransformersModel(Decoder):
    """Has no layers of ours. Belongs to one thread: the modules find the current step in `_step`."""

    def __init__(
        self,
        network: Network,
        architecture: Architecture,
        parameters: Parameters,
        num_positions: int,
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        """`architecture`: this rank's share of the network's, whose modules belong to this model from now on.
        `tensors`: those of the checkpoint."""
        assert isinstance(architecture, TransformersArchitecture)
        self.architecture = architecture
        self.config = architecture.config
        self.parameters = parameters
        self.layers = []
        self.ropes = RopeTables(num_positions, parameters.device)
        self._step = CurrentStep()
        self._attentions: list[PagedAttention] = []
        for call, layer in zip(network.calls, architecture.layers, strict=True):
            own, mixer = call.config, layer.mixer
            assert isinstance(mixer, AttentionConfig)
            rules = AttentionRules(own.scale, self.ropes[None], window=own.window, softcap=own.softcap)
            self._attentions.append(PagedAttention(mixer, rules, self._step, architecture.shard))
            vars(call.module)["paged"] = self._attentions[-1]
        model = network.model
        _fill_buffers(model, parameters.device)
        _Weights(model, architecture, parameters, tensors).place()
        self._base: Any = model.base_model
        self._head: Any = with_child(model, model.base_model_prefix, GivenHidden())
        self._buffers = [buffer for buffer in model.buffers() if buffer.device == parameters.device]

    @property
    def attentions(self) -> Sequence[CachedAttention]:
        return self._attentions

    def storages(self) -> list[torch.UntypedStorage]:
        storages = [*super().storages(), *(buffer.untyped_storage() for buffer in self._buffers)]
        return list({storage.data_ptr(): storage for storage in storages}.values())

    def __call__(self, batch: Batch) -> Tensor:
        """The hidden states after the last norm: [tokens, hidden]"""
        self._step.batch = batch
        output = self._base(input_ids=batch.tokens[None], position_ids=batch.positions[None], use_cache=False)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden] → [rows, vocab]"""
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits


def _fill_buffers(model: Any, device: torch.device) -> None:
    """Computes what checkpoints do not have, such as the frequencies of rotations."""
    waiting: list[str] = []
    stored = model.state_dict(keep_vars=True)
    for path, module in model.named_modules():
        for own, buffer in list(module.named_buffers(recurse=False)):
            name = f"{path}.{own}" if path else own
            if buffer.is_meta:
                if buffer.nbytes > _MAX_BUFFER_BYTES:
                    raise UnsupportedModel(
                        f"{name} of {type(model).__name__} takes {buffer.nbytes / 1e9:.1f} GB besides the "
                        "weights, which is not supported; is the model's config right?"
                    )
                filler = _FILLED_LATER if buffer.is_floating_point() else 0
                setattr(module, own, torch.full_like(buffer, filler, device=device))
                if name not in stored:
                    waiting.append(name)
    initialise(model)
    for name in waiting:
        buffer = model.get_buffer(name)
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise UnsupportedModel(f"the transformers library does not say what {name} of {type(model).__name__} holds")


class _Weights:
    """Gives the modules memory from `Parameters`, and names the tensors of the checkpoint that fill it."""

    def __init__(
        self,
        model: Any,
        architecture: TransformersArchitecture,
        parameters: Parameters,
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        model.tie_weights()
        self._model = model
        self._architecture = architecture
        self._parameters = parameters
        self._targets: dict[str, Tensor] = model.state_dict(keep_vars=True)
        self._sources = sources_of(model, tensors, self._targets)
        self._exact = exact_modules(model)
        self._placed: dict[int, Tensor] = {}
        """By the parameter without memory: what took its place, which tied parameters share."""

    def place(self) -> None:
        self._check_layers()
        for path, module in list(self._model.named_modules()):
            if type(module) is nn.Linear:
                self._place_linear(path, module)
                continue
            for name, parameter in list(module.named_parameters(recurse=False)):
                value = self._tensor(f"{path}.{name}" if path else name, parameter)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
            for name, buffer in list(module.named_buffers(recurse=False)):
                whole_name = f"{path}.{name}" if path else name
                if whole_name in self._targets:  # others are not in checkpoints
                    setattr(module, name, self._tensor(whole_name, buffer, buffer.dtype))

    def _check_layers(self) -> None:
        """Raises UnsupportedModel for tensors of layers that the config does not count: without them the model would
        respond, and wrongly."""
        for target, sources in self._sources.items():
            index = next((int(part) for part in target.split(".") if part.isdecimal()), 0)
            is_extra = target not in self._targets and self._architecture.is_held(sources[0].name)
            if is_extra and index >= self._architecture.config.num_layers:
                raise UnsupportedModel(
                    f"the checkpoint has {sources[0].name}, its config {self._architecture.config.num_layers} layers; "
                    "is this the config of these weights?"
                )

    def _place_linear(self, path: str, linear: nn.Linear) -> None:
        style = self._architecture.division(path)
        group = self._parameters.group
        ranks = group.shard.size if style is not None else 1
        outputs = linear.out_features // (ranks if style == "colwise" else 1)
        inputs = linear.in_features // (ranks if style == "rowwise" else 1)
        matrix = self._matrix(f"{path}.weight", linear.weight, outputs, inputs)
        bias = None
        if linear.bias is not None and (style != "rowwise" or group.shard.is_first):
            bias = self._parameters.empty(outputs)
            self._bind(f"{path}.bias", bias)
        placed = MatrixLinear(matrix, bias)
        if style == "rowwise" and ranks > 1:
            placed = RowParallelMatrixLinear(matrix, bias, group)
        replace_module(self._model, path, placed)

    def _matrix(self, target: str, weight: Tensor, outputs: int, inputs: int) -> Matrix:
        sources = self._sources.get(target, [])
        if id(weight) in self._placed or len(sources) != 1 or sources[0].conversion is not None:
            if (outputs, inputs) != weight.shape:
                raise UnsupportedModel(f"{target} is made of several tensors, so it cannot be divided among devices")
            return DenseMatrix(self._tensor(target, weight))
        return self._parameters.matrix({sources[0].name: outputs}, inputs)

    def _tensor(self, target: str, parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a parameter; that of another one if both are tied."""
        if id(parameter) not in self._placed:
            if any(name in target for name in self._exact):
                dtype = torch.float32
            tensor = self._parameters.empty(*parameter.shape, dtype=dtype)
            self._bind(target, tensor)
            self._placed[id(parameter)] = tensor
        return self._placed[id(parameter)]

    def _bind(self, target: str, destination: Tensor) -> None:
        """A parameter without a source is bound to its own name, which a load reports as missing."""
        for name, part in places(target, destination, self._sources.get(target) or [TensorSource(target)]):
            self._parameters.bind(name, part)
