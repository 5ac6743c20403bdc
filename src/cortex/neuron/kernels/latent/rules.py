"""The parameters of latent attention in one layer, the same for all its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cortex.neuron.kernels.attention.rules import AttentionRules


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRules(AttentionRules):
    """`k_scale` is the weight of the norm of latents."""

    weight: Tensor
    """[heads, plain dims + value dim, latent]: what makes the keys and values of each head of a latent."""
    latent: int
    """Elements of a latent. The rotated dimensions of the key are after them in the pages."""
    interleaved: bool
    """Whether rotated dimensions arrive as pairs side by side. In pages and absorbed queries their halves are apart."""

    @property
    def rope_dims(self) -> int:
        return self.rope.shape[1]

    def key_weight(self, query_dim: int) -> Tensor:
        """[heads, plain dims, latent]"""
        return self.weight[:, : query_dim - self.rope_dims]

    def value_weight(self, query_dim: int) -> Tensor:
        """[heads, value dim, latent]"""
        return self.weight[:, query_dim - self.rope_dims :]
