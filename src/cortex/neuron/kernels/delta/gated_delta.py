"""The gated delta net for a whole step, from projected tokens to mixed, gated values, and its references.

Each value head of a row keeps a matrix M [key dim, value dim]. A token decays M, corrects the value that M recalls for
the key of the token, and reads M with its query:

    M ← e^g M;   M ← M + k ⊗ β (v − Mᵀk);   out = Mᵀq
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.delta.rules import CHUNK, L2_EPS, DeltaRules, DeltaState
from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.recurrent.causal_conv import conv_chunk_reference, conv_rows_reference
from cortex.neuron.kernels.recurrent.rows import advance_rows, one_by_one, pieces


def gated_delta(projected: Tensor, rules: DeltaRules, batch: Batch, state: DeltaState) -> Tensor:
    """projected: [tokens, projected size] → [tokens, value size]. Advances the state of the rows by their tokens."""
    if not has_kernels(projected):
        return gated_delta_reference(projected, rules, batch, state)
    from cortex.neuron.kernels.delta.chunks import delta_chunks
    from cortex.neuron.kernels.delta.few_tokens import delta_few_tokens
    from cortex.neuron.kernels.delta.step import delta_step

    out = torch.empty((len(projected), rules.value_size), dtype=projected.dtype, device=projected.device)

    def step(projected: Tensor, batch: Batch, out: Tensor) -> None:
        delta_step(projected, rules, batch, state, out)

    def chunks(projected: Tensor, batch: Batch, out: Tensor) -> None:
        delta_chunks(projected, rules, batch, state, out)

    def few_tokens(projected: Tensor, batch: Batch, out: Tensor) -> None:
        delta_few_tokens(projected, rules, batch, state, out)

    return advance_rows(projected, batch, out, step=step, chunks=chunks, few_tokens=few_tokens)


def gated_delta_reference(projected: Tensor, rules: DeltaRules, batch: Batch, state: DeltaState) -> Tensor:
    if batch.shares_rows:
        tokens = zip(projected.split(1), one_by_one(batch), strict=True)
        return torch.cat([gated_delta_reference(token, rules, turn, state) for token, turn in tokens])
    heads = rules.value_heads
    x, gate, write, decay_input = projected.split([rules.channels, rules.value_size, heads, heads], dim=-1)
    strength = write.float().sigmoid()
    log_decay = -rules.decay_rate * F.softplus(decay_input.float() + rules.decay_bias)
    parts = []
    decodes = batch.num_decodes
    if decodes:
        rows, positions = batch.rows[:decodes], batch.positions[:decodes]
        mixed = conv_rows_reference(x[:decodes], rules.conv_weight, state.recent, rows, positions)
        q, k, v = (part[:, :, None] for part in split_heads(mixed, rules))
        # A single row is updated in place: its memory is most of the bytes that a step touches.
        memory = state.memory[rows] if decodes > 1 else state.memory[int(rows[0]) :][:1]
        memory.index_fill_(0, (positions == 0).nonzero()[:, 0], 0)
        out = delta_recurrent(q, k, v, log_decay[:decodes, :, None], strength[:decodes, :, None], memory)
        if decodes > 1:
            state.memory[rows] = memory
        parts.append(out.squeeze(2))
    for row in pieces(batch, state.recent, state.memory):
        here = slice(row.offset, row.offset + row.count)
        mixed = conv_chunk_reference(x[here], rules.conv_weight, state.recent, row)
        q, k, v = (part.transpose(0, 1) for part in split_heads(mixed, rules))
        memory = state.memory[row.row] if row.start else torch.zeros_like(state.memory[row.row])
        out, memory = delta_chunked(q, k, v, log_decay[here].t(), strength[here].t(), memory)
        state.memory[row.row] = memory
        parts.append(out.transpose(0, 1))
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
    normed = F.rms_norm(mixed, (rules.value_dim,), rules.norm_weight.float(), rules.eps)
    return (normed.flatten(1) * F.silu(gate.float())).to(projected.dtype)


def split_heads(mixed: Tensor, rules: DeltaRules) -> tuple[Tensor, Tensor, Tensor]:
    """mixed: [tokens, channels] → q and k of unit length (q scaled by its dim), and v: [tokens, value heads, dim]"""
    q, k, v = mixed.float().split([rules.key_size, rules.key_size, rules.value_size], dim=-1)
    q, k = (x.unflatten(-1, (rules.key_heads, rules.key_dim)) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for x in (q, k))
    shared = rules.value_heads // rules.key_heads
    q, k = (x.repeat_interleave(shared, dim=1) for x in (q * rules.key_dim**-0.5, k))
    return q, k, v.unflatten(-1, (rules.value_heads, rules.value_dim))


def delta_recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, memory: Tensor) -> Tensor:
    """Token by token, by definition. Updates `memory` in place.

    q and k: [..., tokens, key dim], v: [..., tokens, value dim], log_decay and strength: [..., tokens],
    memory: [..., key dim, value dim]; all float32.
    """
    out = torch.empty_like(v)
    for token in range(v.shape[-2]):
        here = slice(token, token + 1)
        memory *= log_decay[..., here, None].exp()
        correction = (v[..., here, :] - k[..., here, :] @ memory) * strength[..., here, None]
        memory.addcmul_(k[..., here, :].transpose(-1, -2), correction)
        out[..., here, :] = q[..., here, :] @ memory
    return out


def delta_chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, CHUNK tokens at a time. Returns the memory after the last token; does not change its argument.

    With G the sum of g from the start of a chunk, and M the memory before it, the corrections d of its tokens solve a
    triangular system:

        d_i = β_i (v_i − e^{G_i} Mᵀk_i − Σ_{j<i} e^{G_i − G_j} (k_i·k_j) d_j)

    so d = u − w M with u and w known for all chunks at once; only M is carried from chunk to chunk.
    """
    tokens = v.shape[-2]
    padding = -tokens % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, padding)).unflatten(-2, (-1, CHUNK)) for x in (q, k, v))
    log_decay, strength = (F.pad(x, (0, padding)).unflatten(-1, (-1, CHUNK)) for x in (log_decay, strength))
    total = log_decay.cumsum(-1)  # [..., chunks, CHUNK]
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
    weighted_k = k * strength[..., None]
    system = weighted_k @ k.transpose(-1, -2) * between
    wanted = torch.cat((v * strength[..., None], weighted_k * total[..., None].exp()), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    attended = q @ k.transpose(-1, -2) * between
    decayed_q = q * total[..., None].exp()
    last = total[..., -1:]
    decayed_k = (k * (last - total)[..., None].exp()).transpose(-1, -2)
    chunk_decay = last[..., None].exp()
    outs = []
    for chunk in range(v.shape[-3]):
        correction = u[..., chunk, :, :] - w[..., chunk, :, :] @ memory
        outs.append(decayed_q[..., chunk, :, :] @ memory + attended[..., chunk, :, :] @ correction)
        memory = chunk_decay[..., chunk, :, :] * memory + decayed_k[..., chunk, :, :] @ correction
    return torch.cat(outs, dim=-2)[..., :tokens, :], memory
