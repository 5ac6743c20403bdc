"""Feed-forward blocks with weights, or routed experts, in host memory, in the layout of the device.

For few rows the CPU computes them (`native/experts.c`), while the device computes its own experts, and the device adds
both. On a GPU, kernels write inputs to page-locked memory, raise flags for a thread that waits for them, and wait for
its flag before they read the results: a CUDA graph captures that as it is, and no function of the driver is called.
Where the device cannot map the memory, that is a branch of the stream with copies and a function of the host. For many
rows the weights are copied to the device, through two buffers, and the copies run under the computation. Which expert
lies where is a table, so that experts change places between steps.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from cortex.neuron.kernels.activations import relu_squared_
from cortex.neuron.kernels.expert_pairs import ExpertChoice, PairLists
from cortex.neuron.kernels.jit import gdc_launch_dependents, gdc_wait, has_kernels, jit, launch_options, tl, triton
from cortex.neuron.kernels.matrix import PLAIN, Epilogue, ExpertMatrix
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.host_layers import HostBlock, HostExperts
from cortex.neuron.kernels.moe.host_team import HostTeam, Joint
from cortex.neuron.kernels.moe.mixture import expand_and_contract, mixture, mixture_reference
from cortex.neuron.kernels.moe.routing import choose_rows, choose_rows_reference, list_pairs, router_scores
from cortex.neuron.kernels.norm import rms_norm
from cortex.neuron.kernels.peer_exchange import WAIT_LIMIT_S, await_flag, raise_flag
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
        joint = team.joint(host, len(hidden))
        held = hand_over(hidden, norm_weight, eps, choose(hidden, norm_weight, eps, experts), host, joint, inputs)
        team.begin(joint)
        out = mixture(hidden, norm_weight, eps, experts, residual, inputs, held)
        team.end(joint)
        return take_back(out, joint)
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
        joint = team.joint(host, len(x))
        hand_over_rows(x, joint)
        team.begin(joint)
        team.end(joint)
        return take_back(torch.zeros_like(x) if residual is None else residual, joint)
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
    joint: Joint,
    inputs: Tensor | None,
) -> ExpertChoice:
    """Writes what the CPU needs, and returns the choice by the slots of the device: others have the weight 0."""
    if not has_kernels(hidden):
        joint.x.copy_(rms_norm(hidden, norm_weight, eps) if inputs is None else inputs)
        joint.chosen.copy_(choice.experts)
        joint.weights.copy_(choice.weights)
        slot = host.slot_of[choice.experts.long()]
        return ExpertChoice(slot.clamp(min=0), choice.weights.where(slot >= 0, 0.0))
    held = ExpertChoice(torch.empty_like(choice.experts), torch.empty_like(choice.weights))
    given = hidden if inputs is None else inputs
    _launch_hand_over(given, norm_weight, eps, choice, host.slot_of, held, joint, normed=inputs is None, chooses=True)
    return held


def hand_over_rows(x: Tensor, joint: Joint) -> None:
    """Writes the inputs of a block."""
    if has_kernels(x):
        choice = ExpertChoice(joint.chosen, joint.weights)  # unused: the threads have it
        _launch_hand_over(x, x, 0.0, choice, joint.chosen, choice, joint, normed=False, chooses=False)
    else:
        joint.x.copy_(x)


def _launch_hand_over(
    given: Tensor,
    norm_weight: Tensor,
    eps: float,
    choice: ExpertChoice,
    slot_of: Tensor,
    held: ExpertChoice,
    joint: Joint,
    *,
    normed: bool,
    chooses: bool,
) -> None:
    (rows, width), slots, flags = given.shape, joint.chosen.shape[1], joint.flags
    block = triton.next_power_of_2(width)
    _hand_over_kernel[(rows,)](
        given,
        norm_weight,
        choice.experts,
        choice.weights,
        slot_of,
        joint.x,
        joint.chosen,
        joint.weights,
        held.experts,
        held.weights,
        given if flags is None else flags.progress,
        given if flags is None else flags.call,
        given if flags is None else flags.given,
        ctypes.addressof(joint.call),
        eps,
        SIZE=width,
        BLOCK=block,
        SLOTS=slots,
        SLOTS_BLOCK=triton.next_power_of_2(slots),
        NORMED=normed,
        CHOOSES=chooses,
        FLAGGED=flags is not None,
        num_warps=max(1, min(8, block // 512)),
        **launch_options(given.device),
    )


@jit(do_not_specialize=["call"])
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
    progress,
    call_at,
    flag,
    call,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    CHOOSES: tl.constexpr,
    FLAGGED: tl.constexpr,
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
    if CHOOSES:
        slot = tl.arange(0, SLOTS_BLOCK)
        is_slot = slot < SLOTS
        expert = tl.load(experts + row * SLOTS + slot, mask=is_slot, other=0)
        weight = tl.load(expert_weights + row * SLOTS + slot, mask=is_slot, other=0.0)
        tl.store(chosen + row * SLOTS + slot, expert, mask=is_slot)
        tl.store(weights + row * SLOTS + slot, weight, mask=is_slot)
        place = tl.load(slot_of + expert, mask=is_slot, other=0)
        tl.store(held + row * SLOTS + slot, tl.maximum(place, 0), mask=is_slot)
        tl.store(held_weights + row * SLOTS + slot, tl.where(place >= 0, weight, 0.0), mask=is_slot)
    if FLAGGED:
        tl.debug_barrier()  # the whole row is written before it counts
        if tl.atomic_add(progress, 1, scope="sys") + 1 == tl.num_programs(0):
            turn = tl.load(progress + 1) + 1
            tl.debug_barrier()
            tl.store(progress, 0)
            tl.store(progress + 1, turn)
            tl.store(call_at, call.to(tl.int64))
            tl.debug_barrier()
            lane = tl.arange(0, 1)
            raise_flag(flag.to(tl.int64) + lane, turn + lane)


def take_back(out: Tensor, joint: Joint) -> Tensor:
    """Adds the results of the rows that were handed over, in place."""
    if joint.flags is None:
        return out.add_(joint.result)
    rows, width = out.shape
    block = triton.next_power_of_2(width)
    _take_back_kernel[(rows,)](
        out,
        joint.result,
        joint.flags.progress,
        joint.flags.done,
        out.stride(0),
        WAIT_LIMIT_S,
        SIZE=width,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
        **launch_options(out.device),
    )
    return out


@jit(do_not_specialize=["wait_limit_s"])
def _take_back_kernel(
    out,
    result,
    progress,
    done,
    stride,
    wait_limit_s,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per row."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    values = tl.load(out + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    turn, lane = tl.load(progress + 1), tl.arange(0, 1)
    await_flag(done.to(tl.int64) + lane, turn + lane, wait_limit_s + lane)
    tl.debug_barrier()
    values += tl.load(result + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * stride + column, values.to(out.dtype.element_ty), mask=inside)
