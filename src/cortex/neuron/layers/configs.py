"""The sizes and options of each layer, as a model's architecture sets them.

Imports no torch: a node computes a model's size from them without an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cortex.neuron.delta_sizes import DeltaSizes

SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
"""The supported scaling rules → the settings each requires."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's share of a model that is divided among the devices of a group (tensor parallelism)."""

    rank: int
    size: int
    """Number of ranks."""

    @property
    def is_whole(self) -> bool:
        return self.size == 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part(self, count: int) -> range:
        """This rank's share of `count` things; the shares of two ranks differ by at most one."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)


WHOLE = Shard(0, 1)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions are rotated. The first `dims` dimensions of each head are rotated, the rest pass through."""

    dims: int
    theta: float = 10_000.0
    scaling: str = "default"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of the scaling rule, under the names that checkpoints use."""
    trained_tokens: int = 0
    """Positions the model was trained on; the fallback of yarn."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    bias: bool = False
    """Biases on q, k and v."""
    output_bias: bool = False
    qk_norm: bool = False
    zero_centred_norm: bool = False
    gated: bool = False
    """The q projection also produces a gate. The output is multiplied by its sigmoid."""
    window: int | None = None
    """Positions a token attends to, including its own; None: all."""


@dataclass(frozen=True, slots=True)
class MLPConfig:
    hidden: int
    inner: int
    bias: bool = False
    """Biases on gate and up."""
    output_bias: bool = False


@dataclass(frozen=True, slots=True)
class MoEConfig:
    hidden: int
    inner: int
    """Width of each routed expert."""
    experts: int
    """Number of routed experts, on all ranks together."""
    top_k: int
    renormalise: bool
    """Whether the weights of a token's experts are scaled to sum to one."""
    shared_inner: int = 0
    """Width of the shared expert, which every token uses, weighted by its own sigmoid gate; 0: none."""
    shard: Shard = WHOLE
    """Whole experts are divided among the ranks; every rank routes over all of them."""

    @property
    def held(self) -> range:
        """The routed experts that this rank holds."""
        return self.shard.part(self.experts)

    @property
    def num_shared(self) -> int:
        """The number of experts of width `inner` that hold the shared expert."""
        return -(-self.shared_inner // self.inner)


@dataclass(frozen=True, slots=True)
class GatedDeltaConfig(DeltaSizes):
    hidden: int
    conv_taps: int
    norm_eps: float

    def input_rows(self, prefix: str) -> dict[str, int]:
        """The input projections of the checkpoint (without `.weight`) → their number of rows, in order."""
        return {
            f"{prefix}.in_proj_qkv": self.channels,
            f"{prefix}.in_proj_z": self.value_size,
            f"{prefix}.in_proj_b": self.value_heads,
            f"{prefix}.in_proj_a": self.value_heads,
        }
