"""The sizes and options of each layer, as a model's architecture sets them.

Imports no torch: a node computes a model's size from them without an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cortex.neuron.kernels.moe.rule import DEFAULT_RULE, RouterRule

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "gelu", "relu"]
"""The activations of feed-forward blocks. Gates of decoders support the first three, and encoders all but the third."""
KVOrigin = Literal["projected", "keys"] | int
"""Where a layer's keys and values come from: a projection each, one projection for both, or an earlier layer of the
model, which has this index."""

SCALINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
    "longrope": ("original_max_position_embeddings",),
    "proportional": (),
}
"""The supported scaling rules → the parameters that each requires."""


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
    """How positions are rotated. The first `dims` dimensions of each head are rotated, the rest pass through. Layers
    with equal configs share one table."""

    dims: int
    theta: float = 10_000.0
    scaling: str = "default"
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The settings of the scaling rule, under the names that checkpoints use."""
    trained_tokens: int = 0
    """The number of positions in the model's config: the fallback of yarn, the longest context of longrope."""
    sections: tuple[int, ...] = ()
    """In models whose positions have three axes in pictures (time, row, column): how many pairs turn by each. Those of
    the second and third axis lie among the first ones, every third pair."""

    def axis(self, pair: int) -> int:
        """The axis by which a pair of dimensions turns."""
        axis = pair % 3
        return axis if self.sections and axis and pair < 3 * self.sections[axis] else 0

    @property
    def table_width(self) -> int:
        """Cosines and sines of one position: two for each pair of dimensions that turns."""
        pairs = -(-self.dims // 2)
        if self.scaling == "proportional":
            pairs = max(1, int(self.settings.get("partial_rotary_factor", 1.0) * pairs))
        return 2 * pairs


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A norm over the last dimension: by the root mean square of its elements, times a weight."""

    eps: float
    zero_centred: bool = False
    """Whether the checkpoint stores the weight minus one."""
    subtracts_mean: bool = False
    """Whether the mean is subtracted first, which makes it a layer norm."""
    has_bias: bool = False
    """Whether a bias is added. Only encoders have such norms."""
    scale: float = 1.0
    """A factor of the result, which the weight in memory includes."""
    weightless: bool = False
    """Whether the checkpoint has no weight."""

    @property
    def is_float32(self) -> bool:
        """Whether the weight in memory is in float32: where it is not the one that the checkpoint rounded."""
        return self.zero_centred or self.scale != 1.0


@dataclass(frozen=True, slots=True)
class QKNormConfig:
    """Norms of queries and keys."""

    norm: NormConfig
    spans_heads: bool = False
    """Whether one norm spans all heads of a token; otherwise each head is normalised on its own, with one weight."""
    after_rope: bool = False
    """Whether queries and keys are rotated before the norm."""


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with their position p: times 1 + beta · log(1 + ⌊p / trained_tokens⌋)."""

    beta: float
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class GateConfig:
    """A gate that multiplies the output of attention, projected from the layer's input."""

    name: str | None = None
    """The projection in the checkpoint; None: the q projection also produces the gate, head by head."""
    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    is_per_head: bool = False
    """Whether all elements of a head have one gate."""


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """The factor of the scores before the softmax."""
    rope: RopeConfig | None
    """None: the layer does not encode positions."""
    kv: KVOrigin = "projected"
    bias: bool = False
    """Biases on q, k and v."""
    output_bias: bool = False
    qk_norm: QKNormConfig | None = None
    gate: GateConfig | None = None
    norms_values: bool = False
    """Whether each value head is normalised like the keys, without a weight."""
    window: int | None = None
    """Positions a token attends to, including its own; None: all."""
    query_growth: QueryGrowth | None = None
    sinks: bool = False
    """Each head has a score that takes part in the softmax and stands for no value."""
    softcap: float | None = None
    """Scores x become softcap · tanh(x / softcap); None: they are not capped."""
    whole_pictures: bool = False
    """Whether the positions of a picture see each other."""
    is_causal: bool = True
    """Whether a token attends to no later one. Otherwise it attends to all tokens of its text, and a window of n
    reaches n - 1 positions to both sides."""

    @property
    def gated(self) -> bool:
        """Whether the q projection also produces a gate."""
        return self.gate is not None and self.gate.name is None

    def gate_rows(self, prefix: str) -> dict[str, int]:
        """The projection of a gate of its own (without `.weight`) → its number of rows; empty: there is none."""
        if self.gate is None or self.gate.name is None:
            return {}
        return {f"{prefix}.{self.gate.name}": self.heads * (1 if self.gate.is_per_head else self.head_dim)}

    @property
    def kv_elements(self) -> int:
        """Elements of a token in the KV cache."""
        return 2 * self.kv_heads * self.head_dim if self.owns_kv else 0

    @property
    def source(self) -> int | None:
        """The earlier layer whose KV pages it attends to; None: it has its own."""
        return self.kv if isinstance(self.kv, int) else None

    @property
    def owns_kv(self) -> bool:
        return self.source is None

    def input_rows(self, prefix: str) -> dict[str, int]:
        """The input projections of the checkpoint (without `.weight`) → their number of rows, in order."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {f"{prefix}.q_proj": 2 * q if self.gated else q}
        if self.owns_kv:
            rows[f"{prefix}.k_proj"] = kv
        if self.kv == "projected":
            rows[f"{prefix}.v_proj"] = kv
        return rows

    def norm_sizes(self, prefix: str) -> dict[str, int]:
        """The norms of queries and keys (without `.weight`) → the elements of their weight."""
        if self.qk_norm is None:
            return {}
        q_heads, kv_heads = (self.heads, self.kv_heads) if self.qk_norm.spans_heads else (1, 1)
        sizes = {f"{prefix}.q_norm": q_heads * self.head_dim}
        return sizes | ({f"{prefix}.k_norm": kv_heads * self.head_dim} if self.owns_kv else {})


def halves(gated: bool) -> tuple[str, ...]:
    """The matrices that a feed-forward block multiplies its input by."""
    return ("gate", "up") if gated else ("up",)


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """Attention whose keys and values are made of one latent per token, which the heads share (MLA). The KV cache holds
    the latent and one rotated key, in the place of a key head; the values are made of the latent alone."""

    hidden: int
    heads: int
    latent: int
    """Elements of a latent."""
    plain_dims: int
    """Dimensions of a query or key that are not rotated."""
    rope_dims: int
    """Dimensions that are rotated. They come after the others, and all heads share those of the key."""
    value_dim: int
    scale: float
    """The factor of the scores before the softmax."""
    rope: RopeConfig
    norm: NormConfig
    """It normalises latents and low-rank queries."""
    q_rank: int = 0
    """Elements that queries are made of; 0: they are projected directly."""
    bias: bool = False
    """Biases on what projects to low-rank queries and to latents."""
    output_bias: bool = False
    interleaved: bool = True
    """Whether pairs of adjacent dimensions are rotated; otherwise those half of `rope_dims` apart."""
    window: None = None
    """Without a window."""
    owns_kv: Literal[True] = True

    @property
    def query_dim(self) -> int:
        return self.plain_dims + self.rope_dims

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        """Elements of a token in the KV cache."""
        return self.latent + self.rope_dims

    @property
    def kv_elements(self) -> int:
        """Elements of a token in the KV cache: a value is a part of the key."""
        return self.head_dim

    def input_rows(self, prefix: str) -> dict[str, int]:
        """The input projections of the checkpoint (without `.weight`) → their number of rows, in order."""
        queries = {"q_a_proj": self.q_rank} if self.q_rank else {"q_proj": self.heads * self.query_dim}
        return {f"{prefix}.{name}": rows for name, rows in (queries | {"kv_a_proj_with_mqa": self.head_dim}).items()}


KV_MIXERS = (AttentionConfig, LatentAttentionConfig)
"""The mixers that keep KV."""


@dataclass(frozen=True, slots=True)
class MLPConfig:
    hidden: int
    inner: int
    bias: bool = False
    """Biases on gate and up."""
    output_bias: bool = False
    activation: Activation = "silu"
    """The activation of the gate."""
    gated: bool = True
    """Without a gate, the block of a decoder is down(relu(up(x))²), and that of an encoder down(activation(up(x)))."""
    is_hosted: bool = False
    """Whether its matrices are in host memory."""

    def input_rows(self, prefix: str) -> dict[str, int]:
        """The input projections of the checkpoint (without `.weight`) → their number of rows, in order."""
        return {f"{prefix}.{half}_proj": self.inner for half in halves(self.gated)}


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
    """Width of the shared expert, which every token uses; 0: none."""
    router: RouterRule = DEFAULT_RULE
    has_bias: bool = False
    """Whether the checkpoint has a bias of the choice of experts, `gate.e_score_correction_bias`."""
    gated: bool = True
    """Otherwise every expert is down(relu(up(x))²)."""
    latent: int = 0
    """The width in which the routed experts compute, between two projections; 0: that of the residual stream."""
    biased: bool = False
    """Biases on the router's scores, and on gate, up and down of each expert."""
    activation: Activation = "silu"
    """The activation of the routed experts' gates."""
    router_norm: NormConfig | None = None
    """A norm before the router, `gate.input_scale`; None: the router has the input of the experts."""
    scales_experts: bool = False
    """Whether the checkpoint has a factor for the weight of each expert, `gate.expert_scale`."""
    shard: Shard = WHOLE
    """Whole experts are divided among the ranks; every rank routes over all of them."""
    hosted: int = 0
    """Number of routed experts in host memory, initially the last ones."""

    @property
    def held(self) -> range:
        """The routed experts that this rank holds."""
        return self.shard.part(self.experts)

    @property
    def width(self) -> int:
        """The size of the inputs and outputs of a routed expert."""
        return self.latent or self.hidden

    @property
    def num_shared(self) -> int:
        """The number of experts of width `inner` that can hold the shared expert; 0 if its inputs are others."""
        return 0 if self.latent else -(-self.shared_inner // self.inner)

    @property
    def num_scores(self) -> int:
        """Scores of a token: one for each routed expert, and one for the gate of the shared expert."""
        return self.experts + (self.router.gates_shared and self.shared_inner > 0)

    @property
    def router_rows(self) -> int:
        """Rows of the router. Those after the gate do not count: libraries are slow unless there are multiples of
        eight."""
        return self.experts if self.num_scores == self.experts else -(-self.num_scores // 8) * 8


@dataclass(frozen=True, slots=True)
class PerLayerInputsConfig:
    """The inputs that every layer has of its own, made from the tokens and their embeddings before the first layer."""

    vocab: int
    hidden: int
    size: int
    """Elements of one layer's input."""
    num_layers: int
    norm: NormConfig
    """Applies to what is projected from the embedding, whose scale is included in `eps`."""
    embedding_scale: float
    """The factor of the tokens' embeddings."""

    @property
    def width(self) -> int:
        """Elements of all layers' inputs."""
        return self.size * self.num_layers


@dataclass(frozen=True, slots=True)
class PerLayerInputConfig:
    """The use of a layer's own input: adds norm(projection(activation(gate(x)) · input)) to the residual stream."""

    hidden: int
    size: int
    norm: NormConfig
