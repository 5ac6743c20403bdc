"""How a family is stored in GGUF files, and shared parts of several families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

FLOAT32_DIGITS: Final = 7
"""GGUF stores float32. Rounding restores the value in the hub's config: 1e-05, not 9.999999747378752e-06."""
MAX_EXPERTS: Final = 1 << 12
MAX_HEADS: Final = 1 << 14
"""Far above every published model; they bound the work for a damaged file."""
SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""


class GGUFKeys(Protocol):
    """Typed access to a file's metadata: `weights/gguf/keys.py`. Every method raises CheckpointError."""

    def number(self, name: str, default: float | None = None) -> float: ...
    def count(self, name: str, default: int | None = None, limit: int = ...) -> int: ...
    def layer_counts(self, name: str, num_layers: int, default: int | None = None) -> list[int]: ...
    def counts(self, name: str, num_layers: int, default: int | None = None) -> list[int]: ...
    def num_rows(self, tensor: str) -> int: ...
    def has(self, name: str) -> bool: ...
    def has_tensor(self, name: str) -> bool: ...
    def flag(self, name: str, default: bool) -> bool: ...
    def windows(self, num_layers: int, period: int, *, is_first: bool = False) -> dict[str, Any]: ...
    def unsupported(self, name: str, reason: str) -> Exception: ...
    def malformed(self, reason: str) -> Exception: ...


Options = Callable[[GGUFKeys, Mapping[str, Any]], dict[str, Any]]
"""(keys, config so far) → what the config gets in addition."""


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """Files whose `general.architecture` is `name`."""

    name: str
    options: Options | None = None
    """The family's own options as its `config.json` has them."""
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer that Llama lacks or calls otherwise, by the hub's names."""
    is_mixture: bool = False
    mixer: Literal["attention", "gated_delta", "short_convolution", "mamba"] = "attention"
    """The mixer that most layers have instead of attention."""
    rotates_part: bool = False
    """Whether a part of each head rotates."""
    is_interleaved: bool = False
    """Whether converters interleave the rotary halves of queries and keys."""
    heads_by_layer: bool = False
    """Whether layers may have different numbers of heads."""
    sizes_by_layer: bool = False
    """Whether layers differ in size, as described by `options`; the config has the sizes of the first."""
    norms: Literal["plain", "plus_one", "plus_one_but_last"] = "plain"
    """Whether converters add one to the weights of norms."""
    last_norm: str = "output_norm"
    norm_eps: float | None = None
    """Where files leave it out."""
    is_tiled: bool = False
    """Whether converters put the value heads of gated delta nets into another order."""
    head: Literal["", "layer", "mtp"] = ""
    """Where the hub has the head that predicts further tokens: in the layer after the last, or under `mtp`. Empty: it
    is not read."""
    pools: bool = False
    """Whether its models only make vectors and scores."""


SHARED_EXPERT: Final = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
AFTER_BLOCKS: Final = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
AROUND_BLOCKS: Final = {**AFTER_BLOCKS, "ffn_norm": "pre_feedforward_layernorm"}
FUSED: Final = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


def optional_number(keys: GGUFKeys, name: str) -> float | None:
    return keys.number(name) if keys.has(name) else None


def optional_count(keys: GGUFKeys, name: str) -> int:
    """Zero if the file does not have it."""
    return keys.count(name) if keys.has(name) else 0


def num_dense(keys: GGUFKeys) -> int:
    """Layers before the first mixture of experts."""
    return optional_count(keys, "leading_dense_block_count")


def check_scoring(keys: GGUFKeys, known: int) -> None:
    """Rejects a router whose scoring function differs from the family's."""
    if keys.has("expert_gating_func") and keys.count("expert_gating_func") != known:
        raise keys.unsupported("expert_gating_func", f"of this family only {known} is supported")


def ropes_by_type(config: Mapping[str, Any], windowed_theta: float) -> dict[str, Any]:
    """Layers with a window rotate by a theta of their own, without a scaling."""
    return {
        "full_attention": {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {})},
        "sliding_attention": {"rope_type": "default", "rope_theta": windowed_theta},
    }


def experts(keys: GGUFKeys) -> dict[str, Any]:
    return {
        "num_experts": keys.count("expert_count", limit=MAX_EXPERTS),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=True),
    }


def mamba(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    heads, inner = keys.count("ssm.time_step_rank", limit=MAX_HEADS), keys.count("ssm.inner_size")
    if inner % heads:
        raise keys.malformed(f"has {inner} values of Mamba for {heads} heads, which do not divide")
    layers = range(config["num_hidden_layers"])
    return {
        "heads": heads,
        "inner": inner,
        "groups": keys.count("ssm.group_count", limit=MAX_HEADS),
        "state": keys.count("ssm.state_size"),
        "taps": keys.count("ssm.conv_kernel"),
        "has_bias": any(keys.has_tensor(f"blk.{layer}.ssm_conv1d.bias") for layer in layers),
    }


def layer_types(keys: GGUFKeys, config: Mapping[str, Any], other: str) -> list[str]:
    """Layers without key-value heads are of the `other` type."""
    kv_heads = keys.layer_counts("attention.head_count_kv", config["num_hidden_layers"])
    return ["full_attention" if count else other for count in kv_heads]
