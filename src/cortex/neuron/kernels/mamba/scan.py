"""Mamba-2 for a whole step, from projected tokens to gated values, and its references.

Each head of a row keeps a matrix M [state dim, head dim]. A token with the time step s (positive) decays M, writes its
value under its key, and reads M with its query; a share of the value goes directly to the output:

    M ← e^{−rate · s} M + k ⊗ s v;   out = (Mᵀq + skip · v) · silu(gate)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.mamba.rules import CHUNK, MambaRules, MambaState
from cortex.neuron.kernels.recurrent.causal_conv import conv_chunk_reference, conv_rows_reference
from cortex.neuron.kernels.recurrent.rows import advance_rows, one_by_one, pieces


def mamba(projected: Tensor, rules: MambaRules, batch: Batch, state: MambaState) -> Tensor:
    """projected: [tokens, projected size] → [tokens, inner] float32. Advances the state of the rows by their tokens."""
    if not has_kernels(projected):
        return mamba_reference(projected, rules, batch, state)
    from cortex.neuron.kernels.mamba.chunks import mamba_chunks
    from cortex.neuron.kernels.mamba.few_tokens import mamba_few_tokens
    from cortex.neuron.kernels.mamba.step import mamba_step

    def step(projected: Tensor, batch: Batch, out: Tensor) -> None:
        mamba_step(projected, rules, batch, state, out)

    def chunks(projected: Tensor, batch: Batch, out: Tensor) -> None:
        mamba_chunks(projected, rules, batch, state, out)

    def few_tokens(projected: Tensor, batch: Batch, out: Tensor) -> None:
        mamba_few_tokens(projected, rules, batch, state, out)

    out = batch.empty("scanned", (len(projected), rules.inner), projected, torch.float32)
    return advance_rows(projected, batch, out, step=step, chunks=chunks, few_tokens=few_tokens)


def mamba_reference(projected: Tensor, rules: MambaRules, batch: Batch, state: MambaState) -> Tensor:
    if batch.shares_rows:
        tokens = zip(projected.split(1), one_by_one(batch), strict=True)
        return torch.cat([mamba_reference(token, rules, turn, state) for token, turn in tokens])
    gate, x, steps = projected.split([rules.inner, rules.channels, rules.heads], dim=-1)
    size = F.softplus(steps.float() + rules.step_bias)  # [tokens, heads]
    log_decay = -rules.decay_rate * size
    conv = rules.conv_weight, state.recent
    parts = []
    decodes = batch.num_decodes
    if decodes:
        rows, positions = batch.rows[:decodes], batch.positions[:decodes]
        mixed = conv_rows_reference(x[:decodes], *conv, rows, positions, rules.conv_bias)
        v, k, q = split_heads(mixed, rules)
        # A single row is updated in place: its memory is most of the bytes that a step touches.
        memory = state.memory[rows] if decodes > 1 else state.memory[int(rows[0]) :][:1]
        memory.index_fill_(0, (positions == 0).nonzero()[:, 0], 0)
        memory *= log_decay[:decodes, :, None, None].exp()
        memory.addcmul_(k[..., :, None], (v * size[:decodes, :, None])[..., None, :])
        if decodes > 1:
            state.memory[rows] = memory
        read = (q[..., None, :] @ memory).squeeze(-2)
        parts.append(read + rules.skip[:, None] * v)
    for row in pieces(batch, state.recent, state.memory):
        here = slice(row.offset, row.offset + row.count)
        v, k, q = split_heads(conv_chunk_reference(x[here], *conv, row, rules.conv_bias), rules)
        memory = state.memory[row.row] if row.start else torch.zeros_like(state.memory[row.row])
        q, k, weighted = (part.transpose(0, 1) for part in (q, k, v * size[here, :, None]))
        read, state.memory[row.row] = mamba_chunked(q, k, weighted, log_decay[here].t(), memory)
        parts.append(read.transpose(0, 1) + rules.skip[:, None] * v)
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.flatten(1) * F.silu(gate.float())


def split_heads(mixed: Tensor, rules: MambaRules) -> tuple[Tensor, Tensor, Tensor]:
    """mixed: [tokens, channels] → values [tokens, heads, head dim], keys and queries [tokens, heads, state dim]"""
    v, k, q = mixed.float().split([rules.inner, rules.keys, rules.keys], dim=-1)
    k, q = (x.unflatten(-1, (rules.groups, rules.state_dim)) for x in (k, q))
    k, q = (x.repeat_interleave(rules.heads // rules.groups, dim=1) for x in (k, q))
    return v.unflatten(-1, (rules.heads, rules.head_dim)), k, q


def mamba_chunked(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """What consecutive tokens read, CHUNK tokens at a time, and the memory after the last of them.

    q and k: [..., tokens, state dim], v: [..., tokens, head dim], times its time step, log_decay: [..., tokens],
    memory: [..., state dim, head dim]; all float32. With G the sum of the logarithms from the start of a chunk, and M
    the memory before it:

        out_i = e^{G_i} Mᵀq_i + Σ_{j≤i} e^{G_i − G_j} (q_i·k_j) v_j
    """
    tokens = v.shape[-2]
    padding = -tokens % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(-2, (-1, CHUNK)) for x in (q, k, v))
    total = F.pad(log_decay, (0, padding)).unflatten(-1, (-1, CHUNK)).cumsum(-1)  # [..., chunks, CHUNK]
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
    within = (q @ k.transpose(-1, -2) * between) @ v
    last = total[..., -1:]
    written = (k * (last - total)[..., None].exp()).transpose(-1, -2) @ v  # [..., chunks, state dim, head dim]
    decayed_q = q * total[..., None].exp()
    outs = []
    for chunk in range(v.shape[-3]):
        outs.append(within[..., chunk, :, :] + decayed_q[..., chunk, :, :] @ memory)
        memory = memory * last[..., chunk, :, None].exp() + written[..., chunk, :, :]
    return torch.cat(outs, dim=-2)[..., :tokens, :], memory
