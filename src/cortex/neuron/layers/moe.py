"""The mixture of experts that replaces the feed-forward block. A router selects the experts of each token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from cortex.neuron.kernels.activations import relu_squared_
from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.layouts import DeviceLayout
from cortex.neuron.kernels.matrix import ExpertMatrix
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.host_layers import HostExperts
from cortex.neuron.kernels.moe.hosted import hosted_mixture
from cortex.neuron.kernels.moe.mixture import mixture
from cortex.neuron.kernels.moe.shared_gate import add_gated
from cortex.neuron.layers.configs import MoEConfig, halves
from cortex.neuron.layers.linear import GatedLinear, Linear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Binding, Parameters


class MoE:
    """Holds all experts of this rank in one stack. The shared expert is split into parts of a routed expert's width.

    The checkpoint may store routed experts separately or stacked. Where the routed experts stay quantised and the
    shared one has another format or width, it is a block of its own.
    """

    def __init__(self, parameters: Parameters, config: MoEConfig, prefix: str) -> None:
        self._group = parameters.group
        self.shared: SharedExpert | None = None
        self.host: HostExperts | None = None
        self._team = parameters.host
        num_shared = 0
        quantised = None if config.hosted else _quantised_experts(parameters, config, prefix)
        gate_up: ExpertMatrix
        down: ExpertMatrix
        if config.hosted:
            gate_up, down, self.host = _divided_experts(parameters, config, prefix)
        elif quantised is None:
            num_shared = config.num_shared
            gate_up, down = _dense_experts(parameters, config, prefix)
        else:
            gate_up, down, num_shared = quantised
        router = parameters.empty(config.router_rows, config.hidden)
        router[config.num_scores :].zero_()  # no tensor fills them, and weights are named by all their bytes
        gate = router[config.experts : config.num_scores]
        parameters.bind(f"{prefix}.gate.weight", router[: config.experts])
        if len(gate):
            parameters.bind(f"{prefix}.shared_expert_gate.weight", gate)
        if config.shared_inner and not num_shared:
            self.shared = SharedExpert(parameters, config, prefix, gate if len(gate) else None)
        self._latent: tuple[Linear, Linear] | None = None
        if config.latent:
            self._latent = (
                Linear(parameters, config.hidden, {f"{prefix}.fc1_latent_proj": config.latent}),
                Linear(parameters, config.latent, {f"{prefix}.fc2_latent_proj": config.hidden}),
            )
        self.experts = Experts(
            router[: config.num_scores if num_shared else config.experts],
            gate_up,
            down,
            config.top_k,
            config.renormalise,
            num_shared,
            config.held.start,
            gated=config.gated,
            activation=config.activation,
            rule=config.router,
            bias=_bias(parameters, config, prefix),
            router_norm=_router_norm(parameters, config, prefix),
            scales=_scales(parameters, config, prefix),
            aligned_router=router if num_shared and len(gate) else None,
            slot_of=None if self.host is None else self.host.slot_of,
            expert_on=None if self.host is None else self.host.experts_on,
            **(biases := _biases(parameters, config, prefix)),
        )
        if self.host is not None and biases:
            self.host.biases = (biases["gate_up_bias"], biases["down_bias"])

    def __call__(self, x: Tensor, norm: RMSNorm | None, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] → residual + experts(norm(x))"""
        assert norm is not None, "every family has a norm before its experts"
        if residual is None or not self._group.shard.is_first:
            residual = torch.zeros_like(x)
        if self.shared is not None:
            residual = self.shared(x, norm, residual)
        compute = mixture
        if self.host is not None and self._team is not None:
            compute = partial(hosted_mixture, host=self.host, team=self._team)
        if self._latent is None:
            return self._group.all_reduce(compute(x, norm.weight, norm.eps, self.experts, residual=residual))
        into, back = self._latent
        inputs = into(x, norm=norm)
        mixed = compute(x, norm.weight, norm.eps, self.experts, residual=torch.zeros_like(inputs), inputs=inputs)
        return self._group.all_reduce(back(mixed, residual=residual))


class ParallelExperts:
    """A mixture parallel to a feed-forward block, with the same residual stream as its input. Both results are
    normalised and added."""

    def __init__(self, experts: MoE, after_block: RMSNorm, before: RMSNorm, after: RMSNorm) -> None:
        self.experts = experts
        self._after_block, self._before, self._after = after_block, before, after

    def __call__(self, block: Tensor, hidden: Tensor) -> Tensor:
        """block: what the feed-forward block made of `hidden`, both [tokens, hidden] → [tokens, hidden]"""
        return self._after(self.experts(hidden, self._before), residual=self._after_block(block))


class SharedExpert:
    """The expert that every token uses, with or without a gate; on a rank of a divided model, a part of the sum."""

    def __init__(self, parameters: Parameters, config: MoEConfig, prefix: str, gate: Tensor | None) -> None:
        """gate: [1, hidden]"""
        name = f"{prefix}.shared_expert"
        self._gate_up: GatedLinear | Linear
        if config.gated:
            first, second = (f"{name}.{half}_proj" for half in halves(config.gated))
            self._gate_up = GatedLinear(parameters, config.hidden, config.shared_inner, first, second)
        else:
            self._gate_up = Linear(parameters, config.hidden, {f"{name}.up_proj": config.shared_inner})
        self._is_gated = config.gated
        self._down = Linear(parameters, config.shared_inner, {f"{name}.down_proj": config.hidden})
        self._gate = gate

    def __call__(self, hidden: Tensor, norm: RMSNorm, residual: Tensor) -> Tensor:
        """hidden: [tokens, hidden] → residual + sigmoid(gate) · expert(norm(hidden)): [tokens, hidden]"""
        inner = self._gate_up(hidden, norm=norm)
        out = self._down(inner if self._is_gated else relu_squared_(inner))
        if self._gate is None:
            return residual + out
        return add_gated(out, hidden, norm.weight, norm.eps, self._gate, residual)


def _quantised_experts(
    parameters: Parameters, config: MoEConfig, prefix: str
) -> tuple[ExpertMatrix, ExpertMatrix, int] | None:
    """Gate and up of the routed experts, and down; None if they are dense or of several formats. The shared expert
    follows them where it has their format and width: then the number is 1."""
    names = [f"{prefix}.experts.{expert}" for expert in range(len(config.held))]
    gate_up, downs = _expert_rows(parameters, config, names)
    layouts = [parameters.stack_layout(each) for each in (gate_up, downs)]
    if layouts[0] is None or not isinstance(layouts[1], DeviceLayout):
        return None
    num_shared = 0
    if config.num_shared and config.shared_inner == config.inner:
        name = f"{prefix}.shared_expert"
        shared = [{f"{name}.{half}_proj.weight": config.inner for half in halves(config.gated)}]
        shared_down = [{f"{name}.down_proj.weight": config.width}]
        if layouts == [parameters.stack_layout(each) for each in (shared, shared_down)]:
            gate_up, downs, num_shared = gate_up + shared, downs + shared_down, 1
    return parameters.expert_matrix(gate_up, config.width), parameters.expert_matrix(downs, config.inner), num_shared


def _divided_experts(
    parameters: Parameters, config: MoEConfig, prefix: str
) -> tuple[ExpertMatrix, ExpertMatrix, HostExperts]:
    """Gate and up, and down, of the experts on the device, and the experts in host memory."""
    assert parameters.host is not None
    names = [f"{prefix}.experts.{expert}" for expert in range(len(config.held))]
    inputs, downs = _expert_rows(parameters, config, names)
    gate_up, hosted_gate_up = parameters.divided_matrix(inputs, config.width, config.hosted)
    down, hosted_down = parameters.divided_matrix(downs, config.inner, config.hosted)
    host = HostExperts(
        *(hosted_gate_up, hosted_down, (gate_up, down), parameters.host.dtype),
        stream_places=parameters.host.buffer_experts,
        num_experts=config.experts,
        slots=config.top_k,
        gated=config.gated,
        activation=config.activation,
        first=config.held.start,
        num_held=len(config.held),
    )
    parameters.host.layers.append(host)
    return gate_up, down, host


def _expert_rows(
    parameters: Parameters, config: MoEConfig, names: Sequence[str]
) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    """The tensors and rows of each expert: those of gate and up, which may be one tensor, and those of down."""
    joint = [{f"{name}.gate_up_proj.weight": 2 * config.inner} for name in names]
    apart = [{f"{name}.{half}_proj.weight": config.inner for half in halves(config.gated)} for name in names]
    downs = [{f"{name}.down_proj.weight": config.width} for name in names]
    return apart if parameters.stack_layout(joint) is None else joint, downs


def _dense_experts(parameters: Parameters, config: MoEConfig, prefix: str) -> tuple[DenseMatrix, DenseMatrix]:
    """Gate and up of the routed and shared experts, and down."""
    width, inner, routed = config.width, config.inner, len(config.held)
    num_experts = routed + config.num_shared
    parts = halves(config.gated)
    gate_up = parameters.empty(num_experts, len(parts) * inner, width)
    down = parameters.empty(num_experts, width, inner)
    names = [f"{prefix}.experts.{expert}" for expert in range(routed)]
    parameters.bind(
        f"{prefix}.experts.{'_'.join(parts)}_proj",
        gate_up[:routed],
        parts=[
            Binding(f"{name}.gate_up_proj.weight", matrix, parts=_halves(name, matrix.chunk(2), "weight"))
            if config.gated
            else Binding(f"{name}.up_proj.weight", matrix)
            for name, matrix in zip(names, gate_up, strict=False)
        ],
    )
    parameters.bind(
        f"{prefix}.experts.down_proj",
        down[:routed],
        parts=[Binding(f"{name}.down_proj.weight", matrix) for name, matrix in zip(names, down, strict=False)],
    )
    if config.num_shared:
        _bind_shared(parameters, gate_up[routed:], down[routed:], config, f"{prefix}.shared_expert")
    return DenseMatrix(gate_up.flatten(0, 1)), DenseMatrix(down.flatten(0, 1))


def _bias(parameters: Parameters, config: MoEConfig, prefix: str) -> Tensor | None:
    """The bias of the choice of experts."""
    if not config.has_bias:
        return None
    return parameters.load(f"{prefix}.gate.e_score_correction_bias", config.experts, dtype=torch.float32)


def _router_norm(parameters: Parameters, config: MoEConfig, prefix: str) -> Tensor | None:
    """The weight of the norm before the router."""
    if config.router_norm is None:
        return None
    return RMSNorm(parameters, config.hidden, config.router_norm, f"{prefix}.gate.input_scale").weight


def _scales(parameters: Parameters, config: MoEConfig, prefix: str) -> Tensor | None:
    """The factors of the experts' weights."""
    if not config.scales_experts:
        return None
    return parameters.load(f"{prefix}.gate.expert_scale", config.experts, dtype=torch.float32)


def _biases(parameters: Parameters, config: MoEConfig, prefix: str) -> dict[str, Tensor]:
    """The biases of the router and of the routed experts, by the names that `Experts` has for them."""
    if not config.biased:
        return {}
    router = parameters.load(f"{prefix}.gate.bias", config.experts)
    gate_up = parameters.empty(len(config.held), 2, config.inner)
    name = f"{prefix}.experts"
    parameters.bind(f"{name}.gate_up_proj.bias", gate_up.view(-1), parts=_halves(name, gate_up.unbind(1), "bias"))
    down = parameters.load(f"{name}.down_proj.bias", len(config.held), config.hidden)
    return {"router_bias": router, "gate_up_bias": gate_up.view(-1), "down_bias": down.view(-1)}


def _halves(name: str, parts: Sequence[Tensor], kind: str) -> tuple[Binding, ...]:
    """Gate and up, where the checkpoint has them apart."""
    return tuple(Binding(f"{name}.{half}_proj.{kind}", part) for half, part in zip(("gate", "up"), parts, strict=True))


def _bind_shared(parameters: Parameters, gate_up: Tensor, down: Tensor, config: MoEConfig, prefix: str) -> None:
    """Splits the shared expert into parts of the width of the stack. The last part is padded with zeros."""
    hidden, inner, shared_inner, parts = config.hidden, config.inner, config.shared_inner, halves(config.gated)
    for number, (expert_gate_up, expert_down) in enumerate(zip(gate_up, down, strict=True)):
        start = number * inner
        width = min(inner, shared_inner - start)
        if width < inner:
            expert_gate_up.zero_()
            expert_down.zero_()
        for name, rows in zip(parts, expert_gate_up.chunk(len(parts)), strict=True):
            part = partial(_narrow, 0, start, width)
            parameters.bind(f"{prefix}.{name}_proj.weight", rows[:width], part, shape=(shared_inner, hidden))
        part = partial(_narrow, 1, start, width)
        parameters.bind(f"{prefix}.down_proj.weight", expert_down[:, :width], part, shape=(hidden, shared_inner))


def _narrow(dim: int, start: int, length: int, tensor: Tensor) -> Tensor:
    return tensor.narrow(dim, start, length)
