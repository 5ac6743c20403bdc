"""Linear layers. A linear layer knows which checkpoint tensors fill its rows and how they are stored: packed, as the
checkpoint quantises them (`packed.py`), or dense in the model's dtype; never both.

Projections of the same input (q, k and v; gate and up) form one matrix: one read of the input, one launch. The norm
before a matrix and the addition after it are arguments, so that small-batch kernels fuse all three into one pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.products.cpu_matrix import dense_product
from cortex.neuron.kernels.products.matvec import beats_library, gated_matvec, matvec
from cortex.neuron.kernels.silu import silu_mul
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.packed import projections
from cortex.neuron.layers.parameters import Parameters


class Linear:
    """`y = norm(x) Wᵀ + b + residual`. All parts except the matrix are optional."""

    def __init__(
        self,
        parameters: Parameters,
        inputs: int,
        outputs: Mapping[str, int],
        *,
        bias: bool = False,
    ) -> None:
        """`outputs` maps each checkpoint prefix (without `.weight`) to its number of rows, in order."""
        self.inputs = inputs
        self.splits = list(outputs.values())
        sources = {f"{prefix}.weight": rows for prefix, rows in outputs.items()}
        matrices = parameters.packed(sources, inputs)
        self.packed = None if matrices is None else projections(matrices)
        self.weight = parameters.empty(0 if self.packed else sum(self.splits), inputs)  # [out, in]
        self.bias = parameters.empty(sum(self.splits)) if bias else None
        row = 0
        for prefix, rows in outputs.items():
            if self.packed is None:
                parameters.bind(f"{prefix}.weight", self.weight[row : row + rows])
            if self.bias is not None:
                parameters.bind(f"{prefix}.bias", self.bias[row : row + rows])
            row += rows

    def __call__(self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, in] → [tokens, out]. `residual` may be overwritten: use the result in its place."""
        if self.packed is not None:
            return self.packed(x, self.bias, norm, residual)
        if has_kernels(x) and beats_library(*x.shape):
            return matvec(x, self.weight, self.bias, norm.weight if norm else None, norm.eps if norm else 0.0, residual)
        if norm is not None:
            x = norm(x)
        if residual is not None and self.bias is None and x.is_cuda:
            return residual.addmm_(x, self.weight.t())
        y = self._product(x)
        return y if residual is None else y.add_(residual)

    def _product(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.linear(x, self.weight, self.bias)
        y = dense_product(x, self.weight)
        return y if self.bias is None else y.add_(self.bias)


class RowParallelLinear(Linear):
    """A linear layer whose inputs are divided among the ranks: each multiplies its own columns, and the sum over all
    ranks is the result. Only the first rank has a bias, and only it adds the residual."""

    def __init__(self, parameters: Parameters, inputs: int, outputs: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(parameters, inputs, outputs, bias=bias)
        self._group = parameters.group

    def __call__(self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, this rank's inputs] → [tokens, out]"""
        own_residual = residual if self._group.shard.is_first else None
        return self._group.all_reduce(super().__call__(x, norm=norm, residual=own_residual))

    def activated(self, gate_up: Tensor, residual: Tensor | None) -> Tensor:
        """`(silu(gate) · up) Wᵀ + b + residual`. gate_up: [tokens, 2 · this rank's inputs] → [tokens, out]"""
        if self.packed is None or not self.packed.rounds_inputs(gate_up):
            return self(silu_mul(gate_up), residual=residual)
        own_residual = residual if self._group.shard.is_first else None
        return self._group.all_reduce(self.packed.activated(gate_up, self.bias, own_residual))


class GatedLinear:
    """`silu(norm(x) Gᵀ) · (norm(x) Uᵀ)`: the first half of a gated feed-forward block."""

    def __init__(
        self, parameters: Parameters, inputs: int, outputs: int, gate: str, up: str, *, bias: bool = False
    ) -> None:
        self.gate_up = Linear(parameters, inputs, {gate: outputs, up: outputs}, bias=bias)

    def __call__(self, x: Tensor, *, norm: RMSNorm) -> Tensor:
        """x: [tokens, in] → [tokens, out]"""
        out = self.fused(x, norm)
        return silu_mul(self.gate_up(x, norm=norm)) if out is None else out

    def fused(self, x: Tensor, norm: RMSNorm) -> Tensor | None:
        """The result of a kernel that computes all of it; None if there is none for this batch."""
        packed = self.gate_up.packed
        if self.gate_up.bias is not None:
            return None
        if packed is not None:
            return packed.gated(x, norm)
        if has_kernels(x) and beats_library(*x.shape):
            return gated_matvec(x, self.gate_up.weight, norm.weight, norm.eps)
        return None
