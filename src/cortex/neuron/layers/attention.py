"""Self-attention over paged KV or within whole texts: projections, optional q/k norms and output gate, rotation, cache,
attention."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.gate import gate_heads
from cortex.neuron.kernels.attention.paged import attention
from cortex.neuron.kernels.attention.rotate import Rotation
from cortex.neuron.kernels.attention.rules import AttentionRules
from cortex.neuron.kernels.attention.varlen import varlen_attention
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.latent.attention import latent_attention
from cortex.neuron.kernels.latent.rules import LatentRules
from cortex.neuron.layers.configs import AttentionConfig, LatentAttentionConfig
from cortex.neuron.layers.linear import Linear, RowParallelLinear
from cortex.neuron.layers.norm import RMSNorm
from cortex.neuron.layers.parameters import Binding, Parameters
from cortex.neuron.layers.rope import RopeTables


class LayerCache:
    """The KV pages of one layer."""

    def __init__(self, keys: Tensor, values: Tensor, group: int = 0) -> None:
        self.keys = keys  # [pages, page tokens, kv heads, head dim]
        self.values = values
        self.group = group


class CachedAttention(Protocol):
    """The attention of a layer, as the engine sees it."""

    cache: LayerCache
    """Its pages, which the engine sets before the first step."""

    @property
    def config(self) -> AttentionConfig | LatentAttentionConfig: ...


class Attention:
    """Reads and writes the pages in `cache`, which the engine sets before the first step."""

    cache: LayerCache
    rules: AttentionRules

    def __init__(
        self,
        parameters: Parameters,
        config: AttentionConfig,
        ropes: RopeTables,
        prefix: str,
        source: Attention | None = None,
    ) -> None:
        """`source`: the earlier layer whose keys and values this one attends to; None: it has its own."""
        self.config = config
        self._source = source
        self._is_source = False
        if source is not None:
            source._is_source = True  # noqa: SLF001 - of the same class
        self._group = parameters.group
        self.qkv = Linear(parameters, config.hidden, config.input_rows(prefix), bias=config.bias)
        self.heads = [rows // config.head_dim for rows in self.qkv.splits]
        self.num_heads = sum(self.heads)
        q = config.heads * config.head_dim
        self.output = RowParallelLinear(parameters, q, {f"{prefix}.o_proj": config.hidden}, bias=config.output_bias)
        gate = config.gate_rows(prefix)
        self.gate = Linear(parameters, config.hidden, gate) if gate else None
        table, norm = ropes[config.rope], config.qk_norm
        norms: list[RMSNorm] = []
        if norm is not None:
            sizes = config.norm_sizes(prefix)
            norms = [RMSNorm(parameters, size, norm.norm, f"{name}.weight") for name, size in sizes.items()]
        self._wide_norms = norms if norm is not None and norm.spans_heads else []
        self._half = 0 if config.rope is None else config.rope.dims // 2
        self._early_rope = table if norm is not None and norm.after_rope else None
        weights: list[Tensor | None] = [None, None]
        if norms and not self._wide_norms:
            weights = [part.weight for part in norms]
        if source is not None:
            weights.append(source.rules.k_scale)
        self.rules = AttentionRules(
            scale=config.scale,
            rope=table if self._early_rope is None else ropes[None],
            q_scale=weights[0],
            k_scale=weights[1],
            eps=norm.norm.eps if norm is not None else 0.0,
            norms_values=config.norms_values,
            pair_distance=self._half if self._early_rope is None else 0,
            window=config.window,
            softcap=config.softcap,
            whole_pictures=config.whole_pictures,
            is_causal=config.is_causal,
            rotates=config.rope is not None and self._early_rope is None,
            sinks=parameters.load(f"{prefix}.sinks", config.heads, dtype=torch.float32) if config.sinks else None,
        )
        self._has_softplus = config.gate is not None and config.gate.activation == "softplus"
        self._growth = None if config.query_growth is None else ropes.growth(config.query_growth)

    def __call__(self, x: Tensor, norm: RMSNorm | None, batch: Batch, residual: Tensor | None = None) -> Tensor:
        """x: [tokens, hidden] → residual + attention(norm(x)). `residual` may be overwritten: use the result."""
        config = self.config
        heads = self.qkv(x, norm=norm).view(-1, self.num_heads, config.head_dim)
        q, *own = torch.split_with_sizes(heads, self.heads, 1)  # `split` is slower: it is written in Python
        k, v = (own[0], own[-1]) if self._source is None else batch.kept[self._source]
        if self._is_source:
            batch.kept[self] = k, v
        gate = None
        if config.gated:
            q, gate = q.view(-1, config.heads, 2 * config.head_dim).chunk(2, dim=-1)
        if self._wide_norms:
            q, k = self._normed(q, k)
        if self._early_rope is not None:
            rotation = Rotation.at(batch.rope_positions, self._early_rope, q.dtype, self._half)
            q, k = rotation(q), rotation(k)
        if self._growth is not None:
            q = (q * self._growth[batch.positions]).to(q.dtype)
        if batch.has_pages:
            cache = self.cache if self._source is None else self._source.cache
            out = attention(q, k, v, self.rules, batch.of_group(cache.group), cache.keys, cache.values)
        else:
            out = varlen_attention(q, k, v, self.rules, batch)
        if self.gate is not None:
            gate = self.gate(x, norm=norm).unflatten(1, (config.heads, -1))
        mixed = out.flatten(1) if gate is None else gate_heads(out, gate, softplus=self._has_softplus)
        return self.output(mixed, residual=residual)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, each normalised over all heads of a token, also over those of other ranks."""
        rows = q.flatten(1), k.flatten(1)
        if self._group.shard.is_whole:
            q_row, k_row = (norm(row) for norm, row in zip(self._wide_norms, rows, strict=True))
        else:
            # Every rank has as many heads as the others, so the mean over all heads is the mean of the ranks' means.
            means = torch.stack([row.float().square().mean(-1) for row in rows], dim=1)
            means = self._group.all_reduce(means) / self._group.shard.size
            q_row, k_row = (
                (row * torch.rsqrt(mean[:, None] + norm.eps) * norm.weight).to(row.dtype)
                for norm, row, mean in zip(self._wide_norms, rows, means.unbind(1), strict=True)
            )
        return q_row.view_as(q), k_row.view_as(k)


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
