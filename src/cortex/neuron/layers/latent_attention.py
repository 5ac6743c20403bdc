"""Attention over paged latents (MLA): low-rank projections, norm of the latent, rotary embedding, cache, attention.

`kv_b_proj`, which makes the keys and values of a head from a latent, is never applied to the latents of the cache.
Queries are multiplied by the keys' part of it instead, and the mixed latents by the values' part, so that all heads
attend to the same latents. Both parts are needed by rows and by columns, so the matrix is dense in every load.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.latent.attention import latent_attention
from cortex.neuron.kernels.latent.rules import LatentRules
from cortex.neuron.layers.attention import LayerCache
from cortex.neuron.layers.configs import LatentAttentionConfig
from cortex.neuron.layers.linear import Linear, RowParallelLinear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Binding, Parameters
from cortex.neuron.layers.rope import RopeTables


class LatentAttention:
    """Reads and writes the pages in `cache`, which the engine sets before the first step."""

    cache: LayerCache

    def __init__(self, parameters: Parameters, config: LatentAttentionConfig, ropes: RopeTables, prefix: str) -> None:
        self.config = config
        self.inputs = Linear(parameters, config.hidden, config.input_rows(prefix), bias=config.bias)
        self.queries: Linear | None = None
        if config.q_rank:
            self.q_norm = RMSNorm(parameters, config.q_rank, config.norm, f"{prefix}.q_a_layernorm.weight")
            rows = {f"{prefix}.q_b_proj": config.heads * config.query_dim}
            self.queries = Linear(parameters, config.q_rank, rows)
        kv_norm = RMSNorm(parameters, config.latent, config.norm, f"{prefix}.kv_a_layernorm.weight")
        self.rules = LatentRules(
            scale=config.scale,
            rope=ropes[config.rope],
            k_scale=kv_norm.weight,
            eps=kv_norm.eps,
            latent=config.latent,
            interleaved=config.interleaved,
            weight=_absorbed(parameters, config, prefix),
        )
        outputs = {f"{prefix}.o_proj": config.hidden}
        mixed = config.heads * config.value_dim
        self.output = RowParallelLinear(parameters, mixed, outputs, bias=config.output_bias)

    def __call__(self, x: Tensor, norm: RMSNorm | None, batch: Batch, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] → residual + attention(norm(x)). `residual` may be overwritten: use the result."""
        config, cache = self.config, self.cache
        q, latents = torch.split_with_sizes(self.inputs(x, norm=norm), self.inputs.splits, 1)
        if self.queries is not None and len(q) == 1:
            q = self.queries(q, norm=self.q_norm)
        elif self.queries is not None:
            q = self.queries(self.q_norm(q))  # the norm takes rows that lie apart, products do not
        q = q.unflatten(1, (config.heads, config.query_dim))
        out = latent_attention(q, latents, self.rules, batch.of_group(cache.group), cache.keys)
        return self.output(out.flatten(1), residual=residual)


def _absorbed(parameters: Parameters, config: LatentAttentionConfig, prefix: str) -> Tensor:
    """[heads, plain dims + value dim, latent]: what makes keys and values of a latent. Files may have it in two parts,
    that of the keys transposed."""
    plain, latent = config.plain_dims, config.latent
    weight = parameters.empty(config.heads, plain + config.value_dim, latent)
    parts = [
        Binding(f"{prefix}.k_b_proj.weight", weight[:, :plain], _transposed, (config.heads, latent, plain)),
        Binding(f"{prefix}.v_b_proj.weight", weight[:, plain:]),
    ]
    parameters.bind(f"{prefix}.kv_b_proj.weight", weight.flatten(0, 1), parts=parts)
    return weight


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2)
