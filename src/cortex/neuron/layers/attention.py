"""Self-attention over paged KV: projections, optional q/k norms and output gate, rotary embedding, cache, attention."""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.paged import attention
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.layers.configs import AttentionConfig
from cortex.neuron.layers.linear import Linear, RowParallelLinear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.layers.rope import RopeTable


class LayerCache:
    """The KV pages of one layer."""

    def __init__(self, keys: Tensor, values: Tensor, group: int = 0) -> None:
        self.keys = keys  # [pages, page tokens, kv heads, head dim]
        self.values = values
        self.group = group


class Attention:
    """Reads and writes the pages in `cache`, which the engine sets before the first step."""

    cache: LayerCache

    def __init__(self, parameters: Parameters, config: AttentionConfig, rope: RopeTable, prefix: str) -> None:
        self.config = config
        q = config.heads * config.head_dim
        kv = config.kv_heads * config.head_dim
        self.qkv = Linear(
            parameters,
            config.hidden,
            {f"{prefix}.q_proj": q * (2 if config.gated else 1), f"{prefix}.k_proj": kv, f"{prefix}.v_proj": kv},
            bias=config.bias,
        )
        self.heads = [rows // config.head_dim for rows in self.qkv.splits]
        self.num_heads = sum(self.heads)
        self.output = RowParallelLinear(parameters, q, {f"{prefix}.o_proj": config.hidden}, bias=config.output_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(
                    parameters,
                    config.head_dim,
                    config.norm_eps,
                    f"{prefix}.{name}.weight",
                    zero_centred=config.zero_centred_norm,
                )
                for name in ("q_norm", "k_norm")
            )
        self.rules = AttentionRules(
            scale=config.head_dim**-0.5,
            rope=rope.table,
            q_scale=self.q_norm.weight if self.q_norm else None,
            k_scale=self.k_norm.weight if self.k_norm else None,
            eps=config.norm_eps,
            window=config.window,
        )

    def __call__(self, hidden: Tensor, norm: RMSNorm, batch: Batch) -> Tensor:
        """hidden: [tokens, hidden] → hidden + attention(norm(hidden))"""
        config = self.config
        heads = self.qkv(hidden, norm=norm).view(-1, self.num_heads, config.head_dim)
        q, k, v = torch.split_with_sizes(heads, self.heads, 1)  # `split` is slower: it is written in Python
        gate = None
        if config.gated:
            q, gate = q.view(-1, config.heads, 2 * config.head_dim).chunk(2, dim=-1)
        cache = self.cache
        out = attention(q, k, v, self.rules, batch.of_group(cache.group), cache.keys, cache.values)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return self.output(out.flatten(1), residual=hidden)
