"""Random weights that follow from the names of their tensors: the same wherever a load puts them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.layers.parameters import Binding, Parameters


def named_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if len(shape) == 1:
        return torch.rand(shape, generator=generator).mul_(0.9).add_(0.1)
    return torch.randn(shape, generator=generator).mul_(2.0 * shape[-1] ** -0.5)


def smallest_parts(bindings: list[Binding]) -> Iterator[Binding]:
    """As a checkpoint has them that keeps every expert, gate and up apart."""
    for binding in bindings:
        if binding.parts:
            yield from smallest_parts(list(binding.parts))
        else:
            yield binding


def fill_by_name(parameters: Parameters) -> None:
    for binding in smallest_parts(parameters.bindings):
        values = named_tensor(binding.source, binding.shape or tuple(binding.destination.shape))
        binding.destination.copy_(values if binding.transform is None else binding.transform(values))
    for packed in parameters.row_bindings:
        packed.matrix.put_values(packed.first_row, named_tensor(packed.source, (packed.num_rows, packed.matrix.inputs)))


def named_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint that has every expert apart."""
    found: dict[str, Tensor] = {}

    def collect(parameters: Parameters) -> None:
        for binding in smallest_parts(parameters.bindings):
            shape = binding.shape or tuple(binding.destination.shape)
            found[binding.source] = named_tensor(binding.source, shape).contiguous()

    spec = LoadSpec("", dtype="float32", max_num_seqs=4, speculation="off")
    build_model(config, spec, torch.device("cpu"), collect)
    return found
