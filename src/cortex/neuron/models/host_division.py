"""Chooses the weights that go to host memory if the device is too small, and estimates the resulting speed.

Routed experts go first: a token reads few of them, so the CPU computes them where they lie, and prompts stream them
over the bus. Feed-forward blocks of layers without experts are the last resort: every token reads them. Attention stays
on the device. Pure, and imports no torch: the engine divides a load with it, and a node previews the load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import UnionType

from cortex.formats.units import gib
from cortex.neuron.kernels.layouts import DeviceLayout
from cortex.neuron.kernels.quantised.layout import OrderedLayout
from cortex.neuron.layers.configs import MLPConfig
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.layer import LayerConfig
from cortex.neuron.models.sizes import (
    WeightStorage,
    block_bytes,
    expert_bytes,
    layer_bytes,
    rounding_bytes,
    weight_bytes,
)

STREAM_BYTES = 192 << 20
"""Limit of each of the two buffers that stream experts to the device, unless a single expert is larger."""
NUM_BUFFERS = 2
PROMPT_TOKENS = 2048
"""Length of the prompt whose speed is estimated."""
NO_EXPERTS = (
    'its layers have no routed experts; with host_weights = "auto" their feed-forward blocks may be in host memory, '
    "which is slow"
)
NOTHING_MOVABLE = "none of its weights can be in host memory"
MIN_ON_DEVICE = 1
"""Routed experts per layer that always stay on the device."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The bytes of one layer, and its movable part: routed experts, or its feed-forward block."""

    dense_bytes: int
    """All but the routed experts."""
    expert_bytes: int = 0
    """One routed expert, where some are in host memory; 0: there are none."""
    experts: int = 0
    top_k: int = 0
    block_bytes: int = 0
    """Bytes of the feed-forward block of a layer without experts, a part of `dense_bytes`; 0 if it cannot move."""
    rounding_bytes: int = 0
    """What all its experts take less while none is in host memory (`hosted_layout`)."""

    @property
    def num_bytes(self) -> int:
        """With everything on the device."""
        return self.dense_bytes + self.experts * self.expert_bytes - self.rounding_bytes

    @property
    def num_movable(self) -> int:
        """Experts, or blocks."""
        return self.experts - MIN_ON_DEVICE if self.experts else int(self.block_bytes > 0)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one expert, or of the block."""
        return self.expert_bytes or self.block_bytes

    @property
    def num_spare(self) -> int:
        """Spare places in host memory for exchanges of experts."""
        return int(self.experts > 0)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second, measured or assumed."""

    device: float = 400e9
    """The device reads its own memory."""
    host: float = 40e9
    """The CPU multiplies weights in host memory."""
    bus: float = 20e9
    """Copies from page-locked host memory to the device."""


@dataclass(frozen=True, slots=True)
class Division:
    device_bytes: int
    """Weights on the device, with the buffers for streaming."""
    host_bytes: int
    """Weights in host memory, and one spare place for exchanges per layer with experts there."""
    moved: tuple[int, ...]
    """Per layer: the number of routed experts in host memory, or whether its block is there."""
    num_expert_layers: int
    """Layers with experts in host memory."""
    num_blocks: int
    """Layers whose feed-forward blocks are in host memory."""
    host_read_bytes: int
    """Average bytes that the CPU reads per token, if all experts are used equally."""
    decode_tokens_s: float
    """Expected speed of one stream."""
    prompt_tokens_s: float
    """Expected speed of a prompt of `PROMPT_TOKENS`."""


def movable_layers(architecture: Architecture, storage: WeightStorage) -> tuple[LayerWeights, ...]:
    """The layers of a model, in order."""
    totals = layer_bytes(architecture, storage)
    return tuple(
        _layer_weights(layer, name, total, storage)
        for (name, layer), total in zip(architecture.named_layers(), totals, strict=True)
    )


def _layer_weights(layer: LayerConfig, name: str, total_bytes: int, storage: WeightStorage) -> LayerWeights:
    prefix = f"{name}.mlp"
    if (mixture := layer.mixture) is not None:
        each, count = expert_bytes(mixture, storage, prefix), len(mixture.held)
        more_bytes = rounding_bytes(mixture, storage, prefix)
        dense_bytes = total_bytes + more_bytes - count * each
        return LayerWeights(dense_bytes, each, count, mixture.top_k, rounding_bytes=more_bytes)
    if not isinstance(layer.feed_forward, MLPConfig):
        return LayerWeights(total_bytes)
    inputs, down = layer.feed_forward.input_rows(prefix), [f"{prefix}.down_proj"]
    is_movable = _has_one_form(inputs, storage, DeviceLayout | OrderedLayout) and _has_one_form(down, storage)
    return LayerWeights(total_bytes, block_bytes=block_bytes(layer.feed_forward, storage, prefix) if is_movable else 0)


def _has_one_form(names: Iterable[str], storage: WeightStorage, kinds: UnionType = DeviceLayout) -> bool:
    """Whether host memory can hold the rows of these tensors as the device would: dense, or in one layout of `kinds`.
    A block can order the rows that it takes (`OrderedLayout`), but not those between its matrices."""
    layouts = {storage.packing.get(f"{name}.weight") for name in names}
    return layouts == {None} or (len(layouts) == 1 and isinstance(layouts.pop(), kinds))


def divide_model(
    architecture: Architecture, storage: WeightStorage, device_bytes: int, host_bytes: int, rates: Rates | None = None
) -> Division | str:
    """`divide` for a model whose weights may take `device_bytes` of the device."""
    layers = movable_layers(architecture, storage)
    other_bytes = weight_bytes(architecture, storage) - sum(layer.num_bytes for layer in layers)
    return divide(layers, other_bytes, device_bytes, host_bytes, rates)


def divide(
    layers: Sequence[LayerWeights],
    other_bytes: int,
    device_bytes: int,
    host_bytes: int,
    rates: Rates | None = None,
    *,
    moves_blocks: bool = True,
) -> Division | str:
    """Moves as few experts as possible, equally many of each layer, and blocks only if experts are not enough. Returns
    the reason where the model cannot be divided.

    `other_bytes`: weights outside the layers. `device_bytes`: what weights may take of the device, without the memory
    of sequences. `host_bytes`: what they may take of the host.
    """
    moved = [0] * len(layers)
    lacking = other_bytes + sum(layer.num_bytes for layer in layers) - device_bytes
    for part in _movable_parts(layers, moves_blocks=moves_blocks):
        if lacking <= 0:
            break
        lacking += buffer_bytes(part.values())
        for index in _in_turns(part):
            if lacking <= 0:
                break
            lacking += layers[index].rounding_bytes * (not moved[index]) - layers[index].unit_bytes
            moved[index] += 1
    if lacking > 0 and not any(moved):
        return NOTHING_MOVABLE if moves_blocks else NO_EXPERTS
    if lacking > 0:
        return f"the device lacks {gib(lacking)}, even with all weights in host memory that can be there"
    division = _division(layers, other_bytes, moved, rates or Rates())
    if division.host_bytes > host_bytes:
        return f"it needs {gib(division.host_bytes)} of host memory, and {gib(host_bytes)} are allowed for weights"
    return division


def most_saved_bytes(layers: Sequence[LayerWeights], *, moves_blocks: bool) -> int:
    """Device memory saved by moving everything that can move."""
    return sum(
        sum(layer.num_movable * layer.unit_bytes - layer.rounding_bytes for layer in part.values())
        - buffer_bytes(part.values())
        for part in _movable_parts(layers, moves_blocks=moves_blocks)
    )


def _movable_parts(layers: Sequence[LayerWeights], *, moves_blocks: bool) -> list[dict[int, LayerWeights]]:
    """The layers with movable weights, by number: those with experts, then those with blocks."""
    movable = {index: layer for index, layer in enumerate(layers) if layer.num_movable}
    experts = {index: layer for index, layer in movable.items() if layer.experts}
    blocks = {index: layer for index, layer in movable.items() if not layer.experts and moves_blocks}
    return [part for part in (experts, blocks) if part]


def buffer_experts(layers: Iterable[LayerWeights]) -> int:
    """How many experts each streaming buffer holds."""
    mixtures = [layer for layer in layers if layer.experts and layer.num_movable]
    if not mixtures:
        return 0
    largest = max(layer.expert_bytes for layer in mixtures)
    return max(1, min(max(layer.num_movable for layer in mixtures) // 8, STREAM_BYTES // largest))


def buffer_bytes(layers: Iterable[LayerWeights]) -> int:
    """Device memory of the buffers: two for streaming, and one expert for exchanges. Layers whose weights are quantised
    differently, which shows in their sizes, have buffers of their own."""
    movable = [layer for layer in layers if layer.num_movable]
    experts = {layer.expert_bytes for layer in movable if layer.experts}
    blocks = {layer.block_bytes for layer in movable if not layer.experts}
    return (NUM_BUFFERS * buffer_experts(movable) + 1) * sum(experts) + NUM_BUFFERS * sum(blocks)


def _in_turns(layers: dict[int, LayerWeights]) -> Iterator[int]:
    """The order in which layers give up an expert or a block: in rounds, the last layer first."""
    for turn in range(max(layer.num_movable for layer in layers.values())):
        yield from (index for index in reversed(layers) if turn < layers[index].num_movable)


def _division(layers: Sequence[LayerWeights], other_bytes: int, moved: Sequence[int], rates: Rates) -> Division:
    device_bytes, host_bytes, weights_bytes = other_bytes, 0, 0
    host_read = decode_s = 0.0
    for layer, count in zip(layers, moved, strict=True):
        device_bytes += layer.num_bytes + layer.rounding_bytes * (count > 0) - count * layer.unit_bytes
        weights_bytes += count * layer.unit_bytes
        host_bytes += (count + layer.num_spare) * layer.unit_bytes if count else 0
        experts_read = layer.top_k * layer.expert_bytes
        on_host = experts_read * count / layer.experts if layer.experts else float(count * layer.block_bytes)
        host_read += on_host
        # the device computes its experts at the same time
        together_s = max(on_host / rates.host, (experts_read - on_host if layer.experts else 0) / rates.device)
        on_device = layer.dense_bytes - (0 if layer.experts else on_host)
        decode_s += on_device / rates.device + together_s
    decode_s += other_bytes / 2 / rates.device  # of embedding and head, a token reads the head
    device_read = device_bytes / rates.device
    parts = _movable_parts(layers, moves_blocks=True)
    device_bytes += sum(buffer_bytes(part.values()) for part in parts if any(moved[index] for index in part))
    return Division(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        moved=tuple(moved),
        num_expert_layers=sum(count > 0 for layer, count in zip(layers, moved, strict=True) if layer.experts),
        num_blocks=sum(count for layer, count in zip(layers, moved, strict=True) if not layer.experts),
        host_read_bytes=int(host_read),
        decode_tokens_s=1 / max(decode_s, 1e-9),
        prompt_tokens_s=PROMPT_TOKENS / max(weights_bytes / rates.bus + device_read, 1e-9),
    )
