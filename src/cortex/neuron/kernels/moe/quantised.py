"""Mixtures whose experts stay quantised: products of each pair of a token and one of its experts.

All experts of a layer are one matrix whose rows lie below one another, so an expert is a number of rows to skip. Small
batches take each pair on its own, as one vector times a matrix; larger ones gather the pairs of an expert into tiles
for the tensor cores, as the dense kernels do (`grouped.py`). Eight-bit floating-point experts multiply rows that are
rounded to eight bits, too, where the tensor cores do that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cortex.neuron.kernels.device_matrix import DeviceMatrix, numbers_of
from cortex.neuron.kernels.float8.experts import float8_grouped_product
from cortex.neuron.kernels.float8.matrix import Float8Matrix
from cortex.neuron.kernels.float8.one_row import expert_rows_float8_product
from cortex.neuron.kernels.float8.rows import float8_rows
from cortex.neuron.kernels.float8.support import has_float8_products
from cortex.neuron.kernels.moe.experts import Experts
from cortex.neuron.kernels.moe.routing import ExpertChoice, ExpertPairs, PairLists
from cortex.neuron.kernels.moe.rule import DEFAULT_RULE, RouterRule
from cortex.neuron.kernels.quantised.experts import packed_grouped_product
from cortex.neuron.kernels.quantised.one_row import expert_rows_product


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """What `Experts` says of dense experts, of quantised ones. There are no shared experts among them."""

    router: Tensor
    """[experts, hidden]"""
    gate_up: DeviceMatrix
    """[held experts · 2 · inner, hidden]: the gate's rows of an expert, then those of up"""
    down: DeviceMatrix
    """[held experts · hidden, inner]"""
    top_k: int
    renormalise: bool
    num_shared: int = 0
    first: int = 0
    """The first expert that is held."""
    rule: RouterRule = DEFAULT_RULE
    bias: Tensor | None = None

    @property
    def num_held(self) -> int:
        return self.down.outputs // self.gate_up.inputs

    @property
    def num_experts(self) -> int:
        return len(self.router)

    @property
    def num_routed(self) -> int:
        return len(self.router)

    @property
    def slots(self) -> int:
        return self.top_k

    @property
    def inner(self) -> int:
        return self.down.inputs

    def dense(self) -> Experts:
        """The same experts as dense weights, for the reference."""
        kind, hidden = self.router.dtype, self.gate_up.inputs
        return Experts(
            self.router,
            numbers_of(self.gate_up).to(kind).view(self.num_held, -1, hidden),
            numbers_of(self.down).to(kind).view(self.num_held, hidden, -1),
            self.top_k,
            self.renormalise,
            first=self.first,
            rule=self.rule,
            bias=self.bias,
        )


def expand_packed_rows(
    hidden: Tensor, norm_weight: Tensor, eps: float, choice: ExpertChoice, experts: PackedExperts
) -> Tensor:
    """silu(norm(x) Gᵀ) · norm(x) Uᵀ by each row's experts. hidden: [rows, hidden] → [pairs, inner]"""
    pairs = len(hidden) * experts.slots
    out = torch.empty((pairs, experts.inner), dtype=hidden.dtype, device=hidden.device)
    _rows_product(hidden, experts.gate_up, out, ExpertPairs(choice.experts, None, experts.slots), norm_weight, eps)
    return out


def contract_packed_rows(inner: Tensor, choice: ExpertChoice, experts: PackedExperts) -> Tensor:
    """weight · inner Dᵀ by pair. inner: [pairs, inner] → [pairs, hidden]"""
    out = torch.empty((len(inner), experts.gate_up.inputs), dtype=inner.dtype, device=inner.device)
    _rows_product(inner, experts.down, out, ExpertPairs(choice.experts, choice.weights, 1), None, 0.0)
    return out


def expand_packed_grouped(x: Tensor, lists: PairLists, experts: PackedExperts) -> Tensor:
    """silu(x Gᵀ) · x Uᵀ by pair. x: [tokens, hidden], normed → [pairs, inner]"""
    out = torch.empty((len(x) * experts.slots, experts.inner), dtype=x.dtype, device=x.device)
    _grouped_product(x, experts.gate_up, experts.num_held, lists, out, pairs_per_row=experts.slots, gated=True)
    return out


def contract_packed_grouped(inner: Tensor, lists: PairLists, experts: PackedExperts) -> Tensor:
    """weight · inner Dᵀ by pair. inner: [pairs, inner] → [pairs, hidden]; 0 for experts that are not held"""
    allocate = torch.empty if experts.num_held == experts.num_routed else torch.zeros
    out = allocate((len(inner), experts.gate_up.inputs), dtype=inner.dtype, device=inner.device)
    _grouped_product(inner, experts.down, experts.num_held, lists, out, pairs_per_row=1, gated=False)
    return out


def _rows_product(
    x: Tensor, matrix: DeviceMatrix, out: Tensor, pairs: ExpertPairs, norm_weight: Tensor | None, eps: float
) -> None:
    """Each pair on its own."""
    if isinstance(matrix, Float8Matrix):
        expert_rows_float8_product(x, matrix, out, pairs, norm_weight, eps)
    else:
        expert_rows_product(x, matrix, out, pairs, norm_weight, eps)


def _grouped_product(
    x: Tensor,
    matrix: DeviceMatrix,
    num_experts: int,
    lists: PairLists,
    out: Tensor,
    *,
    pairs_per_row: int,
    gated: bool,
) -> None:
    """The pairs of each expert together. Without `gated` the product is scaled by the pair's weight."""
    if isinstance(matrix, Float8Matrix):
        rows = float8_rows(x, grouped=False) if has_float8_products(x.device) else x
        float8_grouped_product(rows, matrix, num_experts, lists, out, pairs_per_row=pairs_per_row, gated=gated)
    else:
        packed_grouped_product(x, matrix, num_experts, lists, out, pairs_per_row=pairs_per_row, gated=gated)
