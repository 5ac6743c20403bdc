"""What takes the place of parts of the library's modules: linear layers on our matrices, attention over KV pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cortex.neuron.kernels.attention.paged import attention
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.matrix import PLAIN, Epilogue, Matrix
from cortex.neuron.layers.attention import LayerCache
from cortex.neuron.layers.configs import AttentionConfig, Shard
from cortex.neuron.layers.parallel import ParallelGroup
from cortex.neuron.models.errors import UnsupportedModel


class MatrixLinear(nn.Module):
    """`y = x Wᵀ + b`, the weights in any storage."""

    def __init__(self, matrix: Matrix, bias: Tensor | None) -> None:
        super().__init__()
        self.matrix = matrix
        self.bias = bias
        self.in_features, self.out_features = matrix.inputs, matrix.outputs

    @property
    def weight(self) -> Tensor:
        """Some modules read the dtype of their linear layers, or multiply by the weights themselves."""
        if not isinstance(self.matrix, DenseMatrix):
            raise UnsupportedModel("a module of the library uses a matrix itself, so it cannot be quantised")
        return self.matrix.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] → [..., out]"""
        rows = x.reshape(-1, x.shape[-1])
        return self.matrix.product(rows, PLAIN, Epilogue(self.bias)).view(*x.shape[:-1], -1)


class RowParallelMatrixLinear(MatrixLinear):
    """The inputs are divided among the ranks: the sum over all ranks is the result. Only the first has a bias."""

    def __init__(self, matrix: Matrix, bias: Tensor | None, group: ParallelGroup) -> None:
        super().__init__(matrix, bias)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(super().forward(x))


class CurrentStep:
    """The step that the modules compute: they pass their attention no argument of ours."""

    batch: Batch


class PagedAttention:
    """The attention of one layer. Reads and writes the pages in `cache`, which the engine sets before the first
    step."""

    cache: LayerCache

    def __init__(self, config: AttentionConfig, rules: AttentionRules, step: CurrentStep, shard: Shard) -> None:
        self.config = config
        self.rules = rules
        self._step = step
        self._shard = shard

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """query: [1, heads, tokens, dim], key and value: [1, kv heads, tokens, dim], sinks: [heads of all ranks] →
        [1, tokens, heads, dim]. Values may have fewer dimensions than keys, or more."""
        dim, cache, rules = self.config.head_dim, self.cache, self.rules
        q, k, v = (_padded(part[0].transpose(0, 1), dim) for part in (query, key, value))
        if sinks is not None:
            heads = query.shape[1]
            first = self._shard.rank * heads if len(sinks) > heads else 0
            rules = replace(rules, sinks=sinks[first : first + heads].float())
        out = attention(q, k, v, rules, self._step.batch.of_group(cache.group), cache.keys, cache.values)
        return out[None, ..., : value.shape[-1]]


def _padded(heads: Tensor, dim: int) -> Tensor:
    """[tokens, heads, ≤ dim] → [tokens, heads, dim]"""
    missing = dim - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads.contiguous()


class _HiddenOutput:
    """The output of a base model that has only hidden states: each family's output has other parts."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class GivenHidden(nn.Module):
    """Takes the place of the base model in the whole one, which then computes the logits of hidden states."""

    @property
    def decoder(self) -> GivenHidden:
        """Some models call a part of their base model."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        return _HiddenOutput(inputs_embeds)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,  # noqa: ARG001  # rows and windows say what is visible
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that is registered with the library. `module.paged` is set when the model is built."""
    paged: PagedAttention = module.paged  # type: ignore[assignment]
    return paged(query, key, value, s_aux), None


@torch.no_grad()
def replace_module(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(root.get_submodule(parent), own, module)
