"""Counts the work of a loaded model's steps from its own matrices."""

from __future__ import annotations

from collections import Counter

from cortex.neuron.engine.roofline.step_work import ExpertWork, StepWork
from cortex.neuron.kernels.matrix import Matrix
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.layers.configs import AttentionConfig, LatentAttentionConfig
from cortex.neuron.layers.moe import MoE
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.sizes import kv_bytes_per_token, state_bytes


def work_of(model: Decoder) -> StepWork | None:
    """The work of the model, or of this rank of it. None for modules of another library, whose layers are unknown."""
    if not model.layers:
        return None
    architecture, parameters = model.architecture, model.parameters
    item_bytes = parameters.dtype.itemsize
    ends: list[Matrix] = []
    if architecture.has_ends:
        ends = [model.embedding.matrix] if model.config.tied else [model.embedding.matrix, model.head.matrix]
    unread_bytes = 0 if len(ends) < 2 else ends[0].num_bytes  # a tied embedding is read as the head
    matrices = {id(binding.matrix): binding.matrix for binding in parameters.packed_bindings}.values()
    dense_bytes = parameters.num_bytes - sum(matrix.num_bytes for matrix in matrices)
    weights = dense_bytes // item_bytes + sum(map(_num_weights, matrices)) - sum(map(_num_weights, ends))
    expert_bytes: Counter[float] = Counter()
    for experts in _mixtures(model):
        share, routed = experts.top_k / experts.num_routed, experts.num_held / (experts.num_held + experts.num_shared)
        expert_bytes[share] += round(routed * (experts.gate_up.num_bytes + experts.down.num_bytes))
        weights -= round((1 - share) * routed * (_num_weights(experts.gate_up) + _num_weights(experts.down)))
    return StepWork(
        weight_bytes=parameters.num_bytes - unread_bytes - sum(expert_bytes.values()),
        experts=tuple(ExpertWork(num_bytes, share) for share, num_bytes in expert_bytes.items()),
        token_bytes=kv_bytes_per_token(architecture, item_bytes),
        state_bytes=state_bytes(architecture, item_bytes),
        weights_per_token=max(0, weights),
        attention_width=sum(_query_width(layer.mixer) for layer in architecture.layers),
    )


def _mixtures(model: Decoder) -> list[Experts]:
    blocks = [layer.mlp for layer in model.layers]
    blocks += [layer.parallel_experts.experts for layer in model.layers if layer.parallel_experts is not None]
    return [block.experts for block in blocks if isinstance(block, MoE)]


def _query_width(mixer: object) -> int:
    match mixer:
        case AttentionConfig():
            return mixer.heads * mixer.head_dim
        case LatentAttentionConfig():
            return mixer.heads * (mixer.plain_dims + mixer.rope_dims + mixer.value_dim) // 2
    return 0


def _num_weights(matrix: Matrix) -> int:
    return matrix.outputs * matrix.inputs
