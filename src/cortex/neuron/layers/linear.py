"""Linear layers. A linear layer knows which checkpoint tensors fill its rows; the matrix knows how they are
stored.

Projections of the same input (q, k and v; gate and up) form one matrix: one read of the input, one launch. The norm
before a matrix and the addition after it are arguments, so that small-batch kernels fuse all three into one pass.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from cortex.neuron.kernels.matrix import PLAIN, Epilogue, Prologue
from cortex.neuron.layers.norm import RMSNorm
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
        self.matrix = parameters.matrix({f"{prefix}.weight": rows for prefix, rows in outputs.items()}, inputs)
        self.bias = parameters.empty(sum(self.splits)) if bias else None
        row = 0
        for prefix, rows in outputs.items():
            if self.bias is not None:
                parameters.bind(f"{prefix}.bias", self.bias[row : row + rows])
            row += rows

    def __call__(self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, in] → [tokens, out]. `residual` may be overwritten: use the result in its place."""
        return self.matrix.product(x, prologue_of(norm), Epilogue(self.bias, residual))


class RowParallelLinear(Linear):
    """A linear layer whose inputs are divided among the ranks: each multiplies its own columns, and the sum over all
    ranks is the result. Only the first rank has a bias, and only it adds the residual."""

    def __init__(self, parameters: Parameters, inputs: int, outputs: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(parameters, inputs, outputs, bias=bias)
        self._group = parameters.group

    def __call__(self, x: Tensor, *, norm: RMSNorm | None = None, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, this rank's inputs] → [tokens, out]"""
        return self._sum(x, prologue_of(norm), residual)

    def activated(self, gate_up: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        """`(activation(gate) · up) Wᵀ + b + residual`. gate_up: [tokens, 2 · this rank's inputs] → [tokens, out]"""
        return self._sum(gate_up, Prologue(activation=activation), residual)

    def _sum(self, x: Tensor, prologue: Prologue, residual: Tensor | None) -> Tensor:
        own_residual = residual if self._group.shard.is_first else None
        return self._group.all_reduce(self.matrix.product(x, prologue, Epilogue(self.bias, own_residual)))


class GatedLinear:
    """`activation(norm(x) Gᵀ) · (norm(x) Uᵀ)`: the first half of a gated feed-forward block."""

    def __init__(
        self,
        parameters: Parameters,
        inputs: int,
        outputs: int,
        gate: str,
        up: str,
        *,
        bias: bool = False,
        activation: str = "silu",
    ) -> None:
        self.gate_up = Linear(parameters, inputs, {gate: outputs, up: outputs}, bias=bias)
        self.activation = activation

    def __call__(self, x: Tensor, *, norm: RMSNorm | None) -> Tensor:
        """x: [tokens, in] → [tokens, out]"""
        epilogue = Epilogue(self.gate_up.bias, activation=self.activation)
        return self.gate_up.matrix.product(x, prologue_of(norm), epilogue)

    def fused(self, x: Tensor, norm: RMSNorm | None) -> Tensor | None:
        """The result if one kernel computes all of it for this batch; None if the activation is better part of the
        GEMM that follows."""
        is_fused = self.gate_up.bias is None and self.gate_up.matrix.gates(x)
        return self(x, norm=norm) if is_fused else None


def prologue_of(norm: RMSNorm | None) -> Prologue:
    return PLAIN if norm is None else Prologue(norm.weight, norm.eps)
