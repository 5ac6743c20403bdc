"""Writes a checkpoint with random weights: real files of a named shape, for benchmarks that include the load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cortex.neuron.layers.parameters import Binding, Parameters
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.registry import read_architecture

SHARD_BYTES = 2 << 30
BLOCK_ELEMENTS = (1 << 24) + 43
"""Random numbers, generated once and repeated. Not a multiple of any row length, so that no two rows are equal."""


def write_checkpoint(config: Mapping[str, Any], folder: Path) -> None:
    """Writes the config, a tokenizer of `vocab_size` tokens, and bf16 shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(int(config["vocab_size"]), folder / "tokenizer.json")
    weights = RandomWeights()
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def write_shard() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / name)
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes_on_disk(config).items():
        shard[name] = weights.of(shape)
        if sum(tensor.nbytes for tensor in shard.values()) >= SHARD_BYTES:
            write_shard()
    if shard:
        write_shard()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def shapes_on_disk(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the layers of the model read from a checkpoint, with their shapes."""
    parameters = Parameters(torch.device("meta"), torch.bfloat16)
    Decoder(read_architecture(config), parameters, num_positions=1)
    return {binding.source: _stored_shape(binding) for binding in parameters.bindings_from(())}


def _stored_shape(binding: Binding) -> tuple[int, ...]:
    if binding.source.endswith("conv1d.weight"):  # stored as a depthwise convolution
        width, channels = binding.destination.shape
        return channels, 1, width
    return tuple(binding.destination.shape)


class RandomWeights:
    """Vectors (norms) are near 1. Matrices are scaled so that a layer keeps the magnitude of its input."""

    def __init__(self) -> None:
        self._block = torch.randn(BLOCK_ELEMENTS, generator=torch.Generator().manual_seed(0))
        self._scaled: dict[int, torch.Tensor] = {}

    def of(self, shape: tuple[int, ...]) -> torch.Tensor:
        elements = torch.Size(shape).numel()
        if len(shape) == 1:
            return (1 + self._block[:elements] * 0.1).to(torch.bfloat16)
        fan_in = shape[-1]
        if fan_in not in self._scaled:
            self._scaled[fan_in] = (self._block * fan_in**-0.5).to(torch.bfloat16)
        return self._scaled[fan_in].repeat(-(-elements // BLOCK_ELEMENTS))[:elements].view(shape).contiguous()


def write_tokenizer(vocab_size: int, path: Path) -> None:
    """Single bytes, then words that have a spelling but that no text is tokenised into."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġt{index}" for index in range(len(alphabet), vocab_size)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate([*alphabet, *words])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path), pretty=False)
