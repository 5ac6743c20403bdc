"""Which weights of a model lie in host memory, where the device is too small for all of them, and how fast it is then.

Routed experts go first: a token reads few of them, so that the CPU computes those where they lie, and prompts stream
them over the bus. Pure, and imports no torch: the engine divides a load with it, and a node previews the load.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cortex.formats.units import gib
from cortex.neuron.layers.configs import MoEConfig
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.sizes import WeightStorage, expert_bytes, layer_bytes, weight_bytes

STREAM_BYTES = 192 << 20
"""The most that each of the two buffers of a stream of experts to the device takes, if one expert is not larger."""
NUM_BUFFERS = 2
PROMPT_TOKENS = 2048
"""Tokens of the prompt whose speed is estimated."""
NO_EXPERTS = "its layers have no routed experts, and only those are kept in host memory"
MIN_ON_DEVICE = 1
"""Routed experts of each layer that stay on the device."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What one layer takes in bytes, and what of it can be moved."""

    dense_bytes: int
    """All but the routed experts."""
    expert_bytes: int = 0
    """One routed expert; 0: there are none."""
    experts: int = 0
    top_k: int = 0

    @property
    def num_movable(self) -> int:
        return max(0, self.experts - MIN_ON_DEVICE)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second, measured or assumed."""

    device: float = 400e9
    """At which the device reads its memory."""
    host: float = 40e9
    """At which the CPU computes products with weights in host memory."""
    bus: float = 20e9
    """From page-locked host memory to the device."""


@dataclass(frozen=True, slots=True)
class Division:
    device_bytes: int
    """Weights on the device, with the buffers for streaming."""
    host_bytes: int
    """Memory of the host: weights, and one spare place of each layer for exchanges."""
    experts_on_device: tuple[int, ...]
    """Routed experts of each layer that lie on the device."""
    host_layers: tuple[int, ...]
    """Layers of which a part lies in host memory."""
    host_read_bytes: int
    """What the CPU reads for one token, on average, if all experts are used equally."""
    decode_tokens_s: float
    """Expected for one stream."""
    prompt_tokens_s: float
    """Expected for a prompt of `PROMPT_TOKENS`."""


def movable_layers(architecture: Architecture, storage: WeightStorage) -> tuple[LayerWeights, ...]:
    """The layers of a model, in order."""
    found = []
    totals = layer_bytes(architecture, storage)
    for (name, layer), total in zip(architecture.named_layers(), totals, strict=True):
        mixture = layer.feed_forward if isinstance(layer.feed_forward, MoEConfig) else layer.experts
        if mixture is None:
            found.append(LayerWeights(total))
            continue
        each, count = expert_bytes(mixture, storage, f"{name}.mlp"), len(mixture.held)
        found.append(LayerWeights(total - count * each, each, count, mixture.top_k))
    return tuple(found)


def divide_model(
    architecture: Architecture, storage: WeightStorage, device_bytes: int, host_bytes: int, rates: Rates | None = None
) -> Division | str:
    """`divide` for a model whose weights may take `device_bytes` on the device."""
    layers = movable_layers(architecture, storage)
    whole = weight_bytes(architecture, storage)
    other_bytes = whole - sum(layer.dense_bytes + layer.experts * layer.expert_bytes for layer in layers)
    return divide(layers, other_bytes, device_bytes, host_bytes, rates)


def divide(
    layers: Sequence[LayerWeights],
    other_bytes: int,
    device_bytes: int,
    host_bytes: int,
    rates: Rates | None = None,
) -> Division | str:
    """As few experts in host memory as the device needs, equally many of each layer; or the reason why it cannot be.

    `other_bytes`: weights outside the layers. `device_bytes`: what weights may take on the device, without the memory
    of sequences. `host_bytes`: what they may take of the host.
    """
    whole_bytes = other_bytes + sum(layer.dense_bytes + layer.experts * layer.expert_bytes for layer in layers)
    moved = [0] * len(layers)
    lacking = whole_bytes - device_bytes
    if lacking > 0:
        if not any(layer.num_movable for layer in layers):
            return NO_EXPERTS
        lacking += buffer_bytes(layers)
        for index in _in_turns(layers):
            if lacking <= 0:
                break
            moved[index] += 1
            lacking -= layers[index].expert_bytes
        if lacking > 0:
            return f"even with its routed experts in host memory, {gib(lacking)} are lacking on the device"
    division = _division(layers, other_bytes, moved, rates or Rates())
    if division.host_bytes > host_bytes:
        return f"it needs {gib(division.host_bytes)} of host memory, and {gib(host_bytes)} are allowed for weights"
    return division


def buffer_experts(layers: Sequence[LayerWeights]) -> int:
    """How many experts are streamed at a time."""
    largest = max((layer.expert_bytes for layer in layers), default=0)
    most = max((layer.num_movable for layer in layers), default=0)
    return max(1, min(most // 8, STREAM_BYTES // largest)) if largest else 0


def buffer_bytes(layers: Sequence[LayerWeights]) -> int:
    """The buffers on the device: those of a stream, and one expert for exchanges. Layers whose experts are quantised
    differently have their own, which their sizes tell."""
    sizes = {layer.expert_bytes for layer in layers if layer.num_movable}
    return (NUM_BUFFERS * buffer_experts(layers) + 1) * sum(sizes)


def _in_turns(layers: Sequence[LayerWeights]) -> Iterator[int]:
    """Layers whose next expert is moved, the last layers first in each turn."""
    for turn in range(max(layer.num_movable for layer in layers)):
        yield from (index for index in reversed(range(len(layers))) if turn < layers[index].num_movable)


def _division(layers: Sequence[LayerWeights], other_bytes: int, moved: Sequence[int], rates: Rates) -> Division:
    device_bytes, host_bytes, weights_bytes = other_bytes, 0, 0
    host_read = decode_s = 0.0
    for layer, count in zip(layers, moved, strict=True):
        device_bytes += layer.dense_bytes + (layer.experts - count) * layer.expert_bytes
        weights_bytes += count * layer.expert_bytes
        host_bytes += (count + 1) * layer.expert_bytes if count else 0
        read = layer.top_k * layer.expert_bytes
        on_host = read * count / layer.experts if count else 0.0
        host_read += on_host
        # the device computes its experts at the same time
        decode_s += layer.dense_bytes / rates.device + max(on_host / rates.host, (read - on_host) / rates.device)
    decode_s += other_bytes / 2 / rates.device  # of embedding and head, a token reads the head
    device_read = device_bytes / rates.device
    device_bytes += buffer_bytes(layers) if weights_bytes else 0
    return Division(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        experts_on_device=tuple(layer.experts - count for layer, count in zip(layers, moved, strict=True)),
        host_layers=tuple(index for index, count in enumerate(moved) if count),
        host_read_bytes=int(host_read),
        decode_tokens_s=1 / max(decode_s, 1e-9),
        prompt_tokens_s=PROMPT_TOKENS / max(weights_bytes / rates.bus + device_read, 1e-9),
    )
