"""The sizes of a model in bytes, computed from its architecture before anything is allocated.

Imports no torch: the engine plans a load with it, and a node's preflight predicts the load. Tests compare the results
with the layers' allocations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cortex.neuron.kernels.layouts import DeviceLayout, MatrixLayout, StackLayout, hosted_layout, stack_layout
from cortex.neuron.kernels.quantised.layout import ORDER_BYTES, OrderedLayout
from cortex.neuron.layers.configs import (
    KV_MIXERS,
    AttentionConfig,
    LatentAttentionConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    PerLayerInputConfig,
    PerLayerInputsConfig,
    QueryGrowth,
    RopeConfig,
    halves,
)
from cortex.neuron.layers.recurrent.configs import RecurrentConfig
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.layer import EXPERT_NORMS, LayerConfig
from cortex.neuron.models.packing import draft_output
from cortex.neuron.models.pooling.config import DenseStep, NormStep, Step
from cortex.neuron.models.towers.config import PASS_PATCHES, tower_room_bytes, tower_weight_bytes
from cortex.neuron.models.transformers.architecture import TransformersArchitecture
from cortex.neuron.weights.stored import TensorInfo

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class WeightStorage:
    """The form of a model's weights on its device."""

    item_bytes: int
    """The size of one element in the dtype that the model computes in."""
    packing: Mapping[str, MatrixLayout] = field(default_factory=dict)
    """Name of a tensor → the layout in which it stays quantised; tensors left out are dense."""
    kv_item_bytes: int | None = None
    """The size of one element in the KV cache; None: `item_bytes`."""
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    """Those of the checkpoint. Needed for models of a library, whose configs do not tell the sizes of their weights."""
    pass_patches: int = PASS_PATCHES["cpu"]
    """Patches of pictures that a vision tower computes at once; 0: the tower is not on this device."""

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """The size of a dense matrix."""
        return rows * columns * self.item_bytes

    def linear_bytes(self, inputs: int, outputs: Mapping[str, int]) -> int:
        """The size of a matrix whose rows come from several tensors (checkpoint prefix → rows)."""
        packed = self.packed_bytes(inputs, outputs)
        return self.matrix_bytes(sum(outputs.values()), inputs) if packed is None else packed

    def packed_bytes(self, inputs: int, outputs: Mapping[str, int]) -> int | None:
        """The size of these rows if all of them stay quantised; None if one is dense, because then all are."""
        layouts = {prefix: self.packing.get(f"{prefix}.weight") for prefix in outputs}
        if None in layouts.values():
            return None
        codes = sum(layout.num_bytes(outputs[prefix], inputs) for prefix, layout in layouts.items() if layout)
        return codes + self.order_bytes(inputs, outputs)

    def order_bytes(self, inputs: int, outputs: Iterable[str]) -> int:
        """The size of the orders of columns of these rows, if all of them stay quantised."""
        layouts = {self.packing.get(f"{prefix}.weight") for prefix in outputs}
        num_orders = sum(isinstance(layout, OrderedLayout) for layout in layouts)
        return 0 if None in layouts else num_orders * ORDER_BYTES * inputs


def weight_bytes(architecture: Architecture, storage: WeightStorage) -> int:
    """All parameters of a model; of a divided one, those of this rank."""
    if isinstance(architecture, TransformersArchitecture):
        return _held_bytes(architecture, storage)
    total = sum(layer_bytes(architecture, storage))
    if architecture.pooling is not None:
        total += sum(_step_bytes(step, storage) for step in architecture.pooling.steps)
    total += _tower_weights(architecture, storage)
    return total + end_bytes(architecture, storage) if architecture.has_ends else total


def _tower_weights(architecture: Architecture, storage: WeightStorage) -> int:
    tower = architecture.held_tower if storage.pass_patches else None
    return 0 if tower is None else tower_weight_bytes(tower, storage.item_bytes)


def tower_bytes(architecture: Architecture, storage: WeightStorage) -> int:
    """All that a vision tower takes on its device."""
    return _tower_weights(architecture, storage) + tower_room(architecture, storage)


def tower_room(architecture: Architecture, storage: WeightStorage) -> int:
    """The memory in which a vision tower computes, and which keeps its vectors."""
    tower = architecture.held_tower if storage.pass_patches else None
    return 0 if tower is None else tower_room_bytes(tower, storage.item_bytes, storage.pass_patches)


def token_room(architecture: Architecture, storage: WeightStorage) -> int:
    """The memory in which a layer computes, for each token: its inputs, what it projects them to, and its results."""
    hidden, widest = architecture.config.hidden, 0
    for name, layer in architecture.named_layers():
        mixer, feed_forward, elements = layer.mixer, layer.feed_forward, 0
        if isinstance(mixer, RecurrentConfig):
            elements += 2 * sum(mixer.input_rows("").values())
        elif mixer is not None:
            elements += mixer.heads * mixer.head_dim * 3 + 2 * mixer.kv_elements
        if isinstance(feed_forward, MoEConfig):
            slots = feed_forward.top_k + -(-feed_forward.shared_inner // max(1, feed_forward.inner))
            has_orders = isinstance(storage.packing.get(f"{name}.mlp.experts.0.up_proj.weight"), OrderedLayout)
            elements += slots * (2 * feed_forward.inner + (1 + has_orders) * hidden)
        elif feed_forward is not None:
            elements += 3 * feed_forward.inner
        widest = max(widest, elements)
    return (widest + 6 * hidden) * storage.item_bytes


def _held_bytes(architecture: TransformersArchitecture, storage: WeightStorage) -> int:
    """The tensors of the checkpoint that the model has memory for."""
    packing, total = architecture.packing_of(storage.packing), 0
    for name, info in storage.tensors.items():
        if architecture.is_held(name):
            layout = packing.get(name)
            count = math.prod(info.shape)
            total += count * storage.item_bytes if layout is None else layout.num_bytes(*info.shape)
            total += ORDER_BYTES * info.shape[1] if isinstance(layout, OrderedLayout) else 0
    return total


def _step_bytes(step: Step, storage: WeightStorage) -> int:
    """The parameters of a step after the pooling."""
    match step:
        case DenseStep():
            biases = step.outputs * step.bias * storage.item_bytes
            return storage.linear_bytes(step.inputs, {step.source: step.outputs}) + biases
        case NormStep():
            return step.size * (1 + step.bias) * storage.item_bytes
        case _:
            return 0


def end_bytes(architecture: Architecture, storage: WeightStorage) -> int:
    """The parameters outside the layers: embedding, last norm and head, and what predicts further tokens."""
    config, prefix = architecture.config, architecture.prefix
    vocab = len(architecture.shard.part(config.vocab))
    if config.tied:  # the head multiplies by the embedding
        ends = storage.linear_bytes(config.hidden, {f"{prefix}.embed_tokens": vocab})
    else:
        embedding = storage.packed_bytes(config.hidden, {f"{prefix}.embed_tokens": vocab})
        ends = storage.matrix_bytes(vocab, config.hidden) if embedding is None else embedding
        ends += storage.linear_bytes(config.hidden, {"lm_head": vocab})
    if architecture.ends.per_layer_inputs is not None:
        ends += _per_layer_inputs_bytes(architecture.ends.per_layer_inputs, architecture, storage)
    ends += sum(storage.matrix_bytes(rows, config.hidden) for rows in architecture.ends.tables.values())
    ends += len(architecture.ends.norms) * _norm_bytes(architecture.ends.norm, config.hidden, storage)
    return ends + head_bytes(architecture, storage)


def head_bytes(architecture: Architecture, storage: WeightStorage) -> int:
    """The parameters of the head that predicts further tokens; 0 where the model is loaded without."""
    head, hidden = architecture.head, architecture.config.hidden
    if head is None:
        return 0
    total = storage.linear_bytes(2 * hidden, {head.projection: hidden})
    if (layout := draft_output(storage.packing, architecture.output, hidden)) is not None:
        total += layout.num_bytes(len(architecture.shard.part(architecture.config.vocab)), hidden)
    total += len(head.norms) * _norm_bytes(head.norm, hidden, storage)
    return total + sum(_layer_bytes(name, layer, hidden, storage) for name, layer in head.named_layers())


def layer_bytes(architecture: Architecture, storage: WeightStorage) -> list[int]:
    """The parameters of each layer."""
    hidden = architecture.config.hidden
    return [_layer_bytes(name, layer, hidden, storage) for name, layer in architecture.named_layers()]


def _layer_bytes(name: str, layer: LayerConfig, hidden: int, storage: WeightStorage) -> int:
    """`name`: the prefix of its tensors."""
    num_norms = len(layer.mixer_norms.names) + len(layer.feed_forward_norms.names)
    total = num_norms * _norm_bytes(layer.norm, hidden, storage)
    if isinstance(layer.mixer, AttentionConfig):
        total += _attention_bytes(layer.mixer, storage, f"{name}.self_attn")
    elif isinstance(layer.mixer, LatentAttentionConfig):
        total += _latent_bytes(layer.mixer, storage, f"{name}.self_attn")
    elif layer.mixer is not None:
        total += _recurrent_bytes(layer.mixer, storage, f"{name}.{layer.mixer.block}")
    if isinstance(layer.feed_forward, MLPConfig):
        total += _mlp_bytes(layer.feed_forward, storage, f"{name}.mlp")
    elif layer.feed_forward is not None:
        total += _moe_bytes(layer.feed_forward, storage, f"{name}.mlp")
    if layer.experts is not None:
        total += len(EXPERT_NORMS) * _norm_bytes(layer.norm, hidden, storage)
        total += _moe_bytes(layer.experts, storage, f"{name}.mlp")
    if layer.per_layer_input is not None:
        total += _per_layer_input_bytes(layer.per_layer_input, storage, name)
    return total + storage.item_bytes * layer.has_factor


def _per_layer_inputs_bytes(config: PerLayerInputsConfig, architecture: Architecture, storage: WeightStorage) -> int:
    """The parameters that make the inputs of all layers."""
    prefix, vocab = architecture.prefix, len(architecture.shard.part(config.vocab))
    total = storage.linear_bytes(config.width, {f"{prefix}.embed_tokens_per_layer": vocab})
    total += storage.linear_bytes(config.hidden, {f"{prefix}.per_layer_model_projection": config.width})
    return total + _norm_bytes(config.norm, config.size, storage)


def _per_layer_input_bytes(config: PerLayerInputConfig, storage: WeightStorage, prefix: str) -> int:
    """The parameters that apply one layer's own input."""
    total = storage.linear_bytes(config.hidden, {f"{prefix}.per_layer_input_gate": config.size})
    total += storage.linear_bytes(config.size, {f"{prefix}.per_layer_projection": config.hidden})
    return total + _norm_bytes(config.norm, config.hidden, storage)


def _norm_bytes(norm: NormConfig, size: int, storage: WeightStorage) -> int:
    num_elements = 0 if norm.weightless else size * (1 + norm.has_bias)
    return num_elements * (_FLOAT32_BYTES if norm.is_float32 else storage.item_bytes)


def kv_bytes_by_window(architecture: Architecture, item_bytes: int) -> dict[int | None, int]:
    """Keys and values of one token over the layers that keep them, for each of the model's windows; the head that
    predicts further tokens is one of these layers."""
    sizes = dict.fromkeys(architecture.windows, 0)
    for layer in (*architecture.layers, *(() if architecture.head is None else (architecture.head.layer,))):
        if isinstance(layer.mixer, KV_MIXERS):
            sizes[layer.mixer.window] += layer.mixer.kv_elements * item_bytes
    return sizes


def kv_bytes_per_token(architecture: Architecture, item_bytes: int) -> int:
    """Keys and values of one token over all layers that keep them."""
    return sum(kv_bytes_by_window(architecture, item_bytes).values())


def position_bytes(architecture: Architecture, num_positions: int) -> int:
    """The tables with a row for each position of a sequence: rotations, which layers share, and growing queries."""
    tables: set[RopeConfig | None] = set()
    growths: set[QueryGrowth] = set()
    if isinstance(architecture, TransformersArchitecture):
        tables.add(None)
    for layer in architecture.layers:
        if isinstance(layer.mixer, KV_MIXERS):
            tables.add(layer.mixer.rope)
        if isinstance(layer.mixer, AttentionConfig):
            if layer.mixer.qk_norm is not None and layer.mixer.qk_norm.after_rope:
                tables.add(None)
            growth = layer.mixer.query_growth
            if growth is not None and num_positions > growth.trained_tokens:
                growths.add(growth)
    width = sum(2 if rope is None else rope.table_width for rope in tables) + len(growths)
    return num_positions * width * _FLOAT32_BYTES


def state_bytes(architecture: Architecture, item_bytes: int) -> int:
    """The recurrent state of one sequence over all layers; 0 for a model that has none."""
    mixers = [layer.mixer for layer in architecture.layers if isinstance(layer.mixer, RecurrentConfig)]
    return sum(
        math.prod(part.shape) * (_FLOAT32_BYTES if part.is_float32 else item_bytes)
        for mixer in mixers
        for part in mixer.state
    )


def _attention_bytes(config: AttentionConfig, storage: WeightStorage, prefix: str) -> int:
    inputs, mixed = config.input_rows(prefix), config.heads * config.head_dim
    total = storage.linear_bytes(config.hidden, inputs)
    total += storage.linear_bytes(mixed, {f"{prefix}.o_proj": config.hidden})
    if gate := config.gate_rows(prefix):
        total += storage.linear_bytes(config.hidden, gate)
    total += (sum(inputs.values()) * config.bias + config.hidden * config.output_bias) * storage.item_bytes
    total += config.heads * _FLOAT32_BYTES * config.sinks
    if config.qk_norm is not None:
        total += _norm_bytes(config.qk_norm.norm, sum(config.norm_sizes(prefix).values()), storage)
    return total


def _latent_bytes(config: LatentAttentionConfig, storage: WeightStorage, prefix: str) -> int:
    """`kv_b_proj` is dense in every load."""
    inputs = config.input_rows(prefix)
    total = storage.linear_bytes(config.hidden, inputs)
    total += (sum(inputs.values()) * config.bias + config.hidden * config.output_bias) * storage.item_bytes
    if config.q_rank:
        total += storage.linear_bytes(config.q_rank, {f"{prefix}.q_b_proj": config.heads * config.query_dim})
    total += storage.matrix_bytes(config.heads * (config.plain_dims + config.value_dim), config.latent)
    total += storage.linear_bytes(config.heads * config.value_dim, {f"{prefix}.o_proj": config.hidden})
    return total + _norm_bytes(config.norm, config.q_rank + config.latent, storage)


def _recurrent_bytes(config: RecurrentConfig, storage: WeightStorage, prefix: str) -> int:
    total = storage.linear_bytes(config.hidden, config.input_rows(prefix))
    for name, columns in config.output_columns(prefix).items():
        total += storage.linear_bytes(columns, {name: config.hidden})
    for tensor in config.tensors:
        if tensor.role == "small":
            item_bytes = _FLOAT32_BYTES if tensor.is_float32 else storage.item_bytes
            total += tensor.num_rows * tensor.row_elements * item_bytes
    return total


def _mlp_bytes(config: MLPConfig, storage: WeightStorage, prefix: str) -> int:
    num_biases = sum(config.input_rows(prefix).values()) * config.bias + config.hidden * config.output_bias
    matrices = 0 if config.is_hosted else block_bytes(config, storage, prefix)
    orders = storage.order_bytes(config.hidden, config.input_rows(prefix))
    return matrices + orders + num_biases * storage.item_bytes


def block_bytes(config: MLPConfig, storage: WeightStorage, prefix: str) -> int:
    """The matrices of a feed-forward block, without the order in which the first take their inputs."""
    inputs = config.input_rows(prefix)
    down = storage.linear_bytes(config.inner, {f"{prefix}.down_proj": config.hidden})
    return storage.linear_bytes(config.hidden, inputs) - storage.order_bytes(config.hidden, inputs) + down


def _moe_bytes(config: MoEConfig, storage: WeightStorage, prefix: str) -> int:
    """The experts are one stack, in which the shared expert takes as many places as it needs."""
    extra = config.experts * _FLOAT32_BYTES * (config.has_bias + config.scales_experts)
    if config.router_norm is not None:
        extra += _norm_bytes(config.router_norm, config.hidden, storage)
    if config.biased:
        extra += (config.experts + len(config.held) * (2 * config.inner + config.hidden)) * storage.item_bytes
    if config.latent:
        extra += storage.linear_bytes(config.hidden, {f"{prefix}.fc1_latent_proj": config.latent})
        extra += storage.linear_bytes(config.latent, {f"{prefix}.fc2_latent_proj": config.hidden})
    if config.hosted:
        held = (len(config.held) - config.hosted) * expert_bytes(config, storage, prefix)
        router = storage.matrix_bytes(config.router_rows, config.hidden)
        return held + extra + router + _shared_bytes(config, storage, prefix)
    layouts = _expert_layouts(config, storage, prefix)
    if layouts is not None:
        packed = _packed_expert_bytes(config, *layouts) + extra
        return packed + storage.matrix_bytes(config.router_rows, config.hidden) + _shared_bytes(config, storage, prefix)
    num_experts = len(config.held) + config.num_shared
    total = storage.matrix_bytes(num_experts * len(halves(config.gated)) * config.inner, config.width)
    total += storage.matrix_bytes(num_experts * config.width, config.inner) + extra
    if not config.num_shared:
        total += _shared_bytes(config, storage, prefix)
    return total + storage.matrix_bytes(config.router_rows, config.hidden)


def _shared_bytes(config: MoEConfig, storage: WeightStorage, prefix: str) -> int:
    """The shared expert of a layer whose routed experts stay quantised."""
    if not config.shared_inner:
        return 0
    name = f"{prefix}.shared_expert"
    inputs = {f"{name}.{half}_proj": config.shared_inner for half in halves(config.gated)}
    total = storage.linear_bytes(config.hidden, inputs)
    return total + storage.linear_bytes(config.shared_inner, {f"{name}.down_proj": config.hidden})


def expert_bytes(config: MoEConfig, storage: WeightStorage, prefix: str) -> int:
    """One routed expert of a layer with some in host memory, without its biases."""
    layouts = _expert_layouts(config, storage, prefix)
    if layouts is not None:
        return _packed_expert_bytes(config, hosted_layout(layouts[0]), layouts[1]) // len(config.held)
    return storage.matrix_bytes((1 + len(halves(config.gated))) * config.inner, config.width)


def rounding_bytes(config: MoEConfig, storage: WeightStorage, prefix: str) -> int:
    """How many bytes the routed experts of a layer take more if some are in host memory."""
    layouts = _expert_layouts(config, storage, prefix)
    if layouts is None:
        return 0
    return len(config.held) * expert_bytes(config, storage, prefix) - _packed_expert_bytes(config, *layouts)


def _packed_expert_bytes(config: MoEConfig, gate_up: StackLayout, down: DeviceLayout) -> int:
    """All routed experts, quantised."""
    num_experts, rows = len(config.held), len(halves(config.gated)) * config.inner
    orders = num_experts * ORDER_BYTES * config.width if isinstance(gate_up, OrderedLayout) else 0
    codes = gate_up.num_bytes(num_experts * rows, config.width)
    return codes + orders + down.num_bytes(num_experts * config.width, config.inner)


def _expert_layouts(config: MoEConfig, storage: WeightStorage, prefix: str) -> tuple[StackLayout, DeviceLayout] | None:
    """Of gate and up of the routed experts, and of down; None if they are dense or of several formats."""
    names = [f"{prefix}.experts.{expert}" for expert in range(len(config.held))]

    def layout(parts: Sequence[str]) -> StackLayout | None:
        return stack_layout([storage.packing.get(f"{name}.{part}_proj.weight") for part in parts] for name in names)

    gate_up, down = layout(["gate_up"]) or layout(halves(config.gated)), layout(["down"])
    return (gate_up, down) if gate_up is not None and isinstance(down, DeviceLayout) else None
