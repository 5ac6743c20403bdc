"""Latent attention for a whole step, from projected queries and latents to the values of each head, and its reference.

Queries are absorbed: multiplied by the key part of `kv_b_proj`, so that they attend to latents. All heads of a token
share each read of a latent, in decode and in prefill.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cortex.neuron.kernels.attention.paged import attend_reference
from cortex.neuron.kernels.attention.rotate import Rotation, store
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.latent.rules import LatentRules
from cortex.neuron.kernels.norm import rms_norm


def latent_attention(q: Tensor, latents: Tensor, rules: LatentRules, batch: Batch, pages: Tensor) -> Tensor:
    """q: [tokens, heads, plain dims + rope dims], latents: [tokens, latent + rope dims], rows may lie apart
    → [tokens, heads, value dim].

    Norms each latent, rotates queries and keys, stores latent and key in the pages ([pages, page tokens, 1, latent +
    rope dims]), and lets each token attend to the positions of its row up to itself.
    """
    if not has_kernels(q):
        return latent_attention_reference(q, latents, rules, batch, pages)
    from cortex.neuron.kernels.latent.decode import decode_latent_attention
    from cortex.neuron.kernels.latent.heads import product_by_head
    from cortex.neuron.kernels.latent.inputs import store_latents
    from cortex.neuron.kernels.latent.prefill import prefill_latent_attention

    tokens, heads, query_dim = q.shape
    query = torch.empty((tokens, heads, pages.shape[-1]), dtype=q.dtype, device=q.device)
    store_latents(q, latents, rules, batch, pages, query)
    product_by_head(q, rules.key_weight(query_dim).transpose(1, 2), query)
    mixed = batch.empty("attended", (tokens, heads, rules.latent), q)
    if batch.num_decodes:
        decode_latent_attention(query, rules, batch, pages, mixed)
    if batch.num_decodes < tokens:
        prefill_latent_attention(query[batch.num_decodes :], rules, batch, pages, mixed[batch.num_decodes :])
    value_weight = rules.value_weight(query_dim)
    out = torch.empty((tokens, heads, value_weight.shape[1]), dtype=q.dtype, device=q.device)
    product_by_head(mixed, value_weight, out)
    return out


def latent_attention_reference(q: Tensor, latents: Tensor, rules: LatentRules, batch: Batch, pages: Tensor) -> Tensor:
    query = absorbed_reference(q, latents, rules, batch, pages)
    # Values are keys without their rotated dimensions. With keys as values, torch has a fast kernel on CPUs.
    mixed = attend_reference(query, rules, batch, pages, pages)[..., : rules.latent]
    return torch.einsum("thl,hvl->thv", mixed, rules.value_weight(q.shape[-1]))


def absorbed_reference(q: Tensor, latents: Tensor, rules: LatentRules, batch: Batch, pages: Tensor) -> Tensor:
    """Stores the latents. → [tokens, heads, latent + rope dims]: the queries that attend to them"""
    assert rules.k_scale is not None
    rotation = batch.once(
        ("rotation", id(rules.rope), q.dtype), lambda: Rotation.at(batch.positions, rules.rope, q.dtype)
    )
    plain, rotated = q.split_with_sizes((q.shape[-1] - rules.rope_dims, rules.rope_dims), -1)
    latent, key = latents.split_with_sizes((rules.latent, rules.rope_dims), -1)
    if rules.interleaved:
        rotated, key = _halves_apart(rotated), _halves_apart(key)
    normed = rms_norm(latent, rules.k_scale, rules.eps)
    store(pages, batch.slots, torch.cat((normed, rotation(key[:, None])[:, 0]), dim=-1)[:, None])
    absorbed = torch.einsum("thn,hnl->thl", plain, rules.key_weight(q.shape[-1]))
    return torch.cat((absorbed, rotation(rotated)), dim=-1)


def _halves_apart(x: Tensor) -> Tensor:
    """x: [..., dims] → the even dimensions, then the odd ones"""
    pairs: Tensor = x.unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2)
