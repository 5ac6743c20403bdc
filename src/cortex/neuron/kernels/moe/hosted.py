"""Feed-forward blocks with weights, or routed experts, in host memory, in the layout of the device.

For few rows the CPU computes them (`native/experts.c`), while the device computes its own experts, and the device adds
both. On a GPU that is a branch of the stream, which a CUDA graph captures as it is: inputs to page-locked memory, a
function of the host, results back. For many rows the weights are copied to the device, through two buffers, and the
copies run under the computation. Which expert lies where is a table, so that experts change places between steps.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cortex.neuron.kernels.activations import relu_squared_
from cortex.neuron.kernels.expert_pairs import ExpertChoice, PairLists
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton
from cortex.neuron.kernels.matrix import PLAIN, Epilogue, ExpertMatrix
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.host_layers import HostBlock, HostExperts
from cortex.neuron.kernels.moe.host_team import HostTeam
from cortex.neuron.kernels.moe.mixture import expand_and_contract, mixture, mixture_reference
from cortex.neuron.kernels.moe.routing import choose_rows, choose_rows_reference, list_pairs, router_scores
from cortex.neuron.kernels.norm import rms_norm
from cortex.neuron.kernels.products.grouped import combine, expert_load


def hosted_mixture(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    experts: Experts,
    host: HostExperts,
    team: HostTeam,
    residual: Tensor | None = None,
    inputs: Tensor | None = None,
) -> Tensor:
    """`mixture` with the experts of the device, and those of `host`."""
    experts = replace(experts, gate_up_bias=host.slot_biases[0], down_bias=host.slot_biases[1])
    if team.computes(host, len(hidden)):
        choose = choose_rows if has_kernels(hidden) else choose_rows_reference
        held = hand_over(hidden, norm_weight, eps, choose(hidden, norm_weight, eps, experts), host, team, inputs)
        result = team.begin(host, len(hidden))
        out = mixture(hidden, norm_weight, eps, experts, residual, inputs, held)
        team.end()
        return out.add_(result)
    if not has_kernels(hidden):
        return _streamed_reference(hidden, norm_weight, eps, experts, host, team, residual, inputs)
    return _streamed(hidden, norm_weight, eps, experts, host, team, residual, inputs)


def _streamed(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    experts: Experts,
    host: HostExperts,
    team: HostTeam,
    residual: Tensor | None,
    inputs: Tensor | None,
) -> Tensor:
    """The pairs of each expert together: those of the device first, while the others are copied."""
    num_pairs, load = len(hidden) * experts.slots, expert_load(len(hidden) * experts.top_k, experts.num_routed)
    x = rms_norm(hidden, norm_weight, eps)
    scored = x if experts.router_norm is None else rms_norm(hidden, experts.router_norm, eps)
    lists = list_pairs(router_scores(scored, experts), experts)
    x = x if inputs is None else inputs
    allocate = torch.empty if host.num_held == host.num_experts else torch.zeros  # other ranks have the others
    parts = allocate(num_pairs, x.shape[1], dtype=x.dtype, device=x.device)

    def compute(gate_up: ExpertMatrix, down: ExpertMatrix, ids: Tensor, used: Tensor | None = None) -> None:
        counts = lists.counts[ids]
        own = PairLists(lists.weights, counts if used is None else counts * used, lists.members[ids])
        gate_up_bias, down_bias = host.biases_of(ids)
        some = replace(experts, gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias)
        expand_and_contract(x, some, own, parts, load)

    compute(experts.gate_up, experts.down, host.experts_on)
    team.streamed(host, lambda up, down, places: compute(up, down, host.experts_in[places], host.is_used[places]))
    return combine(parts, hidden if residual is None else residual)


def _streamed_reference(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    experts: Experts,
    host: HostExperts,
    team: HostTeam,
    residual: Tensor | None,
    inputs: Tensor | None,
) -> Tensor:
    out = mixture_reference(hidden, norm_weight, eps, experts, residual, inputs)

    def compute(gate_up: ExpertMatrix, down: ExpertMatrix, places: slice) -> None:
        nonlocal out
        ids, used = host.experts_in[places], host.is_used[places] > 0
        slots = torch.full_like(host.slot_of, -1)
        slots[ids[used]] = torch.arange(len(ids), dtype=torch.int32)[used]
        up_bias, down_bias = host.biases_of(ids)
        some = replace(experts, gate_up=gate_up, down=down, slot_of=slots, gate_up_bias=up_bias, down_bias=down_bias)
        out = mixture_reference(hidden, norm_weight, eps, some, out, inputs)

    team.streamed(host, compute)
    return out


def hosted_block(x: Tensor, host: HostBlock, team: HostTeam, residual: Tensor | None = None) -> Tensor:
    """x: [tokens, hidden] → residual + block(x): [tokens, hidden]. `residual` may be overwritten: use the result."""
    if team.computes(host, len(x)):
        team.inputs_of(len(x), host.width, host.slots)[0].copy_(x)
        result = team.begin(host, len(x))
        team.end()
        return (torch.zeros_like(x) if residual is None else residual).add_(result)
    results: list[Tensor] = []

    def compute(gate_up: ExpertMatrix, down: ExpertMatrix, _: slice) -> None:
        activation = host.activation if host.gated else None
        inner = gate_up.product(x, PLAIN, Epilogue(host.biases[0], activation=activation))
        inner = inner if host.gated else relu_squared_(inner)
        results.append(down.product(inner, PLAIN, Epilogue(host.biases[1], residual)))

    team.streamed(host, compute)
    return results[0]


def hand_over(
    hidden: Tensor,
    norm_weight: Tensor,
    eps: float,
    choice: ExpertChoice,
    host: HostExperts,
    team: HostTeam,
    inputs: Tensor | None,
) -> ExpertChoice:
    """Writes what the CPU needs, and returns the choice by the slots of the device: others have the weight 0."""
    rows, width = len(hidden), host.width
    x, chosen, weights = team.inputs_of(rows, width, host.slots)
    if not has_kernels(hidden):
        x.copy_(rms_norm(hidden, norm_weight, eps) if inputs is None else inputs)
        chosen.copy_(choice.experts)
        weights.copy_(choice.weights)
        slot = host.slot_of[choice.experts.long()]
        return ExpertChoice(slot.clamp(min=0), choice.weights.where(slot >= 0, 0.0))
    held = ExpertChoice(torch.empty_like(choice.experts), torch.empty_like(choice.weights))
    given = hidden if inputs is None else inputs
    block = triton.next_power_of_2(width)
    _hand_over_kernel[(rows,)](
        given,
        norm_weight,
        choice.experts,
        choice.weights,
        host.slot_of,
        x,
        chosen,
        weights,
        held.experts,
        held.weights,
        eps,
        SIZE=width,
        BLOCK=block,
        SLOTS=host.slots,
        SLOTS_BLOCK=triton.next_power_of_2(host.slots),
        NORMED=inputs is None,
        num_warps=max(1, min(8, block // 512)),
        **launch_options(hidden.device),
    )
    return held


@jit
def _hand_over_kernel(
    given,
    norm_weight,
    experts,
    expert_weights,
    slot_of,
    x,
    chosen,
    weights,
    held,
    held_weights,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    values = tl.load(given + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    if NORMED:
        gain = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        values = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps) * gain
    tl.store(x + row * SIZE + column, values.to(x.dtype.element_ty), mask=inside)
    slot = tl.arange(0, SLOTS_BLOCK)
    is_slot = slot < SLOTS
    expert = tl.load(experts + row * SLOTS + slot, mask=is_slot, other=0)
    weight = tl.load(expert_weights + row * SLOTS + slot, mask=is_slot, other=0.0)
    tl.store(chosen + row * SLOTS + slot, expert, mask=is_slot)
    tl.store(weights + row * SLOTS + slot, weight, mask=is_slot)
    place = tl.load(slot_of + expert, mask=is_slot, other=0)
    tl.store(held + row * SLOTS + slot, tl.maximum(place, 0), mask=is_slot)
    tl.store(held_weights + row * SLOTS + slot, tl.where(place >= 0, weight, 0.0), mask=is_slot)
