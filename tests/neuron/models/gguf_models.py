"""Tiny models of the reference library as GGUF files, written the way that published ones are converted.

Names come from the `gguf` package. What a converter does to the values is written here from its definition.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from .gguf_builds import HYBRID
from .gguf_conversion import converted, encoded
from .gguf_recurrent import RECURRENT, add_recurrent_keys, converted_recurrent

MIXED = (
    "Q4_K",
    "Q6_K",
    "Q8_0",
    "Q5_K",
    "Q3_K",
    "Q2_K",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "F16",
    "BF16",
)
"""The formats that matrices of a mixed file take in turn."""
Override = Callable[[str, Tensor, str], list[tuple[str, Tensor]] | None]


def write_gguf(
    path: Path,
    architecture: str,
    reference: Any,
    formats: tuple[str, ...] = ("F32",),
    *,
    override: Override = lambda *_: None,
    prediction_layers: int = 0,
    extra: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the model, its matrices in `formats` in turn. The model then has the values that the file decodes to.

    `override`: a parameter's name, value and layer → what it becomes instead of what `converted` says.
    """
    config = reference.config.get_text_config()
    writer = gguf.GGUFWriter(path, architecture)
    _add_keys(writer, config, architecture)
    if sections := (getattr(config, "rope_parameters", None) or {}).get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    writer.add_block_count(config.num_hidden_layers + prediction_layers)
    if prediction_layers:
        writer.add_nextn_predict_layers(prediction_layers)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())

    def tensors_of(source: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        source = source.replace("model.language_model.", "model.")
        layer = source.split(".")[2] if ".layers." in source else ""
        if architecture in RECURRENT:
            return list(converted_recurrent(source, tensor, config, layer))
        names = _tensor_names(architecture, config.num_hidden_layers)
        return override(source, tensor, layer) or list(converted(source, tensor, config, architecture, names, layer))

    turns = itertools.cycle(formats)
    with torch.no_grad():
        kept = ("correction_bias", "expert_bias", "layer_scalar")
        biases = [each for each in reference.named_buffers() if each[0].endswith(kept)]
        for source, parameter in (*reference.named_parameters(), *biases):
            if (source == "lm_head.weight" and config.tie_word_embeddings) or re.search(
                "vision|visual|multi_modal", source
            ):
                continue
            if (
                "norm" in source
                or source.endswith("_bias")
                or parameter.dim() == 1
                or "conv1d" in source
                or "conv.conv" in source
            ):
                for name, tensor in tensors_of(source, parameter.float()):
                    writer.add_tensor(name, tensor.numpy(), raw_dtype=gguf.GGMLQuantizationType.F32)
                continue
            # Every matrix is converted by moving its elements, so the same moves of their values say where each went.
            places = torch.arange(parameter.numel()).view(parameter.shape)
            flat = parameter.view(-1)
            moved = zip(tensors_of(source, parameter), tensors_of(source, places), strict=True)
            for (name, tensor), (_, index) in moved:
                format_name = "F32" if name.endswith("ffn_gate_inp_shexp.weight") else next(turns)
                data, values = encoded(tensor.contiguous(), format_name)
                writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[format_name])
                flat[index.reshape(-1)] = values.reshape(-1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@functools.cache
def _tensor_names(architecture: str, num_layers: int) -> gguf.TensorNameMap:
    known = {"laguna": "dots1", "mellum": "qwen3moe", "muse-glimmer": "gemma3"}.get(architecture, architecture)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == known)
    return gguf.get_tensor_name_map(arch, num_layers)


def _add_keys(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(getattr(config, "num_attention_heads_per_layer", None) or config.num_attention_heads)
    if architecture in RECURRENT:
        ropes = getattr(config, "rope_parameters", None) or {"rope_theta": 10_000.0}
        writer.add_rope_freq_base(ropes["rope_theta"])
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        add_recurrent_keys(writer, config, architecture)
        return
    if architecture not in ("deepseek2", "gemma4"):
        kv_heads, num_layers = config.num_key_value_heads, config.num_hidden_layers
        writer.add_head_count_kv([kv_heads] * num_layers if architecture == "granite" else kv_heads)  # as of Granite 4
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    _add_options(writer, config, architecture)
    if architecture not in ("qwen3next", "qwen35moe"):
        writer.add_feed_forward_length(_widths(config))
    if architecture in ("mellum", "qwen3moe", "qwen3next", "qwen35moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture in ("qwen3next", "qwen35moe"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture in ("qwen3next", "qwen35", "qwen35moe"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(HYBRID["full_attention_interval"])
        writer.add_rope_dimension_count(config.head_dim // 4)


def _widths(config: Any) -> int | list[int]:
    """The width of the feed-forward blocks; the last ones may be wider."""
    if not getattr(config, "use_double_wide_mlp", False):
        width: int = config.intermediate_size
        return width
    num_layers, num_wide = config.num_hidden_layers, config.num_kv_shared_layers
    return [config.intermediate_size * (1 + (layer >= num_layers - num_wide)) for layer in range(num_layers)]


def _add_options(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    """What some architectures have, under the keys of their converters."""
    ropes = config.rope_parameters
    scaling = ropes.get("full_attention", ropes)
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "attention_factor" in scaling:
            writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
    window = getattr(config, "sliding_window", None)
    if architecture in ("cohere2", "exaone4", "gemma3", "gpt-oss", "mellum", "olmo2", "phi3") and window is not None:
        writer.add_sliding_window(window)
        if architecture in ("exaone4", "mellum", "olmo2"):
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "cohere2":
        writer.add_logit_scale(config.logit_scale)
    elif architecture == "gemma3":
        writer.add_sliding_window_pattern(4)
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        _add_cap(writer, config)
    elif architecture == "mellum":
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    elif architecture == "gemma4":
        _add_gemma4(writer, config)
    elif architecture in ("ernie4_5-moe", "glm4moe", "gpt-oss", "minimax-m2"):
        _add_experts(writer, config, architecture)
    elif architecture == "deepseek2":
        _add_latents(writer, config)
    elif architecture == "laguna":
        _add_laguna(writer, config)
    elif architecture == "muse-glimmer":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_logit_scale(config.output_multiplier)
        _add_cap(writer, config)
        for layer in range(config.num_hidden_layers):
            for part, weight in (("q", config.qk_scale_factor), ("k", 1.0)):
                values = np.full(config.head_dim, weight, dtype=np.float32)
                writer.add_tensor(f"blk.{layer}.attn_{part}_norm.weight", values)
    elif architecture == "glm4":
        writer.add_rope_dimension_count(config.head_dim // 2)
    elif architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    elif architecture == "mistral3" and config.model_type == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(scaling["mscale_all_dim"])
        writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])
    elif architecture == "phi3" and scaling["rope_type"] == "longrope":
        writer.add_rope_dimension_count(config.head_dim // 2)
        original = scaling["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = math.sqrt(1 + math.log(config.max_position_embeddings / original) / math.log(original))
        writer.add_rope_scaling_attn_factors(scale)
        for name in ("long", "short"):
            factors = np.array(scaling[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors, raw_dtype=gguf.GGMLQuantizationType.F32)


def _add_laguna(writer: gguf.GGUFWriter, config: Any) -> None:
    """The first of four layers has no window, which files do not say."""
    ropes = config.rope_parameters
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_dimension_count(int(config.head_dim * ropes["full_attention"]["partial_rotary_factor"]))
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    width = int(config.head_dim * ropes["sliding_attention"].get("partial_rotary_factor", 1.0))
    writer.add_uint32("laguna.rope.dimension_count_swa", width)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
    writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))


def _add_latents(writer: gguf.GGUFWriter, config: Any) -> None:
    """Latents are written as the one key-value head of all queries."""
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    is_glm = config.model_type == "glm4_moe_lite"  # its files do not name the function of the router
    writer.add_leading_dense_block_count(1 if is_glm else config.first_k_dense_replace)


def _add_cap(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    is_windowed = [kind == "sliding_attention" for kind in config.layer_types]
    layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    head_dim, full = layers[0].head_dim, config.rope_parameters["full_attention"]
    kv_heads = [layer.num_key_value_heads for layer in layers]
    writer.add_head_count_kv(kv_heads if len(set(kv_heads)) > 1 else kv_heads[0])
    writer.add_key_length(layers[-1].head_dim)
    writer.add_value_length(layers[-1].head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(is_windowed)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    _add_cap(writer, config)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_key_length_swa(head_dim)
    writer.add_value_length_swa(head_dim)
    writer.add_rope_dimension_count(layers[-1].head_dim)
    writer.add_rope_dimension_count_swa(head_dim)
    turning = int(full["partial_rotary_factor"] * layers[-1].head_dim // 2)
    factors = np.full(layers[-1].head_dim // 2, 1e30, dtype=np.float32)
    factors[:turning] = 1.0
    writer.add_tensor("rope_freqs.weight", factors, raw_dtype=gguf.GGMLQuantizationType.F32)
    if getattr(config, "enable_moe_block", False):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_experts(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "ernie4_5-moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        return
    writer.add_expert_count(config.num_local_experts)
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(config.head_dim // 2)
    if architecture == "minimax-m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
