"""Models with short convolutions or Mamba-2 as GGUF files: what their converters do, written from its definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
from torch import Tensor

RECURRENT = ("granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.embeddings": "token_embd",
    "model.embedding_norm": "token_embd_norm",
    "model.norm": "output_norm",
    "model.norm_f": "output_norm",
    "lm_head": "output",
    "operator_norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    **{f"{block}.{part}_proj": f"attn_{part}" for block in ("self_attn", "mixer") for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "mixer.o_proj": "attn_output",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("in_proj", "conv", "out_proj")},
    **{f"{block}.in_proj": "ssm_in" for block in ("mamba", "mixer")},
    **{f"{block}.conv1d": "ssm_conv1d" for block in ("mamba", "mixer")},
    **{f"{block}.out_proj": "ssm_out" for block in ("mamba", "mixer")},
    **{f"{block}.norm": "ssm_norm" for block in ("mamba", "mixer")},
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mixer.gate": "ffn_gate_inp",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
}


def converted_recurrent(source: str, tensor: Tensor, config: Any, layer: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the file that one parameter becomes."""
    prefix = f"blk.{layer}." if layer else ""
    own, _, kind = source.split(".", 3)[3].rpartition(".") if layer else source.rpartition(".")
    experts = getattr(config, "num_local_experts", 0)
    if kind in ("A_log", "D"):
        yield (
            prefix + ("ssm_a" if kind == "A_log" else "ssm_d"),
            (-tensor.exp() if kind == "A_log" else tensor)[:, None],
        )
    elif kind == "dt_bias":
        yield f"{prefix}ssm_dt.bias", tensor
    elif kind in ("expert_bias", "e_score_correction_bias"):
        yield f"{prefix}exp_probs_b.bias", tensor
    elif own.endswith("experts"):
        parts = {"gate_up_proj": ("gate", "up"), "up_proj": ("up",), "down_proj": ("down",)}[kind]
        for part, half in zip(parts, tensor.chunk(len(parts), dim=1), strict=True):
            yield f"{prefix}ffn_{part}_exps.weight", half
    elif own.startswith("shared_mlp"):
        parts = ("gate", "up") if "input" in own else ("down",)
        for part, half in zip(parts, tensor.chunk(len(parts)), strict=True):
            yield f"{prefix}ffn_{part}{'_shexp' if experts else ''}.weight", half
    else:
        name = f"{prefix}{_NAMES[own]}.{kind}"
        if "conv" in name and kind == "weight" and tensor.dim() == 3:
            tensor = tensor.squeeze(1)
        elif name.endswith("ssm_norm.weight"):
            tensor = tensor.view(getattr(config, "n_groups", 1), -1)
        elif config.model_type == "granitemoehybrid" and own in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in own else config.num_key_value_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        yield name, tensor


def add_recurrent_keys(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    """What differs from other architectures, under the keys of their converters."""
    is_attention = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * has for has in is_attention])
    if architecture in ("lfm2", "lfm2moe"):
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_feed_forward_length(config.intermediate_size)
        if architecture == "lfm2moe":
            writer.add_expert_count(config.num_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
            writer.add_leading_dense_block_count(config.num_dense_layers)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        return
    is_granite = architecture == "granitehybrid"
    writer.add_layer_norm_rms_eps(config.rms_norm_eps if is_granite else config.layer_norm_epsilon)
    heads = config.mamba_n_heads if is_granite else config.mamba_num_heads
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * (config.mamba_d_head if is_granite else config.mamba_head_dim))
    writer.add_ssm_group_count(config.mamba_n_groups if is_granite else config.n_groups)
    writer.add_ssm_state_size(config.mamba_d_state if is_granite else config.ssm_state_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv if is_granite else config.conv_kernel)
    if is_granite:
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        has_experts = config.num_local_experts > 0
        writer.add_feed_forward_length(config.intermediate_size if has_experts else config.shared_intermediate_size)
        if has_experts:
            writer.add_expert_count(config.num_local_experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        return
    kind, width = ("mlp", config.intermediate_size)
    if architecture == "nemotron_h_moe":
        kind, width = "moe", config.moe_intermediate_size
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        if config.moe_latent_size is not None:
            writer.add_moe_latent_size(config.moe_latent_size)
    writer.add_feed_forward_length([width * (each == kind) for each in config.layer_types])
