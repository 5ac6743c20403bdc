"""The configs of families: what they leave out, what they ask for that is not implemented, and every kind of rope
scaling: the frequencies of the reference library, or an error that names it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cortex.neuron.layers.configs import KV_MIXERS, MoEConfig, RopeConfig
from cortex.neuron.layers.rope import inverse_frequencies
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.layer import LayerConfig
from cortex.neuron.models.registry import read_architecture

from ..tiny_models import tiny_delta, tiny_experts
from .family_models import CASES, TABLE
from .tiny_family import SIZES

TRAINED = 32
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "telepathy": {},
}
REJECTED = ("dynamic", "telepathy")
"""The frequencies of `dynamic` depend on the length of a sequence, which pages of other sequences do not have."""

LIBRARY_ONLY = {
    *("initializer_range", "embedding_initializer_range", "transformers_version", "dtype", "pretraining_tp"),
    *("attention_dropout", "hidden_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"),
    *("router_aux_loss_coef", "rescale_prenorm_residual", "output_attentions", "output_hidden_states", "return_dict"),
    *("_name_or_path", "chunk_size_feed_forward", "bos_token_id", "eos_token_id", "eod_token_id", "problem_type"),
    *("is_encoder_decoder", "num_labels", "id2label", "label2id", "num_logits_to_keep"),
}
"""Options of training and of the library's own objects, which no family reads. They are in every config."""


def ropes_of(config: dict[str, Any]) -> set[RopeConfig]:
    mixers = (layer.mixer for layer in read_architecture(config).layers)
    return {mixer.rope for mixer in mixers if isinstance(mixer, KV_MIXERS) and mixer.rope is not None}


def plain_ropes() -> dict[str, tuple[dict[str, Any], int]]:
    """The families whose layers all rotate alike, with the config of one of their models and its rotated dimensions."""
    found = {}
    for family, entry in TABLE.items():
        if entry.tower is not None or family == "phi3":  # Phi-3 takes any kind for longrope
            continue
        config = entry.config_of(next(iter(entry.changes))).to_dict()
        ropes = ropes_of(config)
        given = config.get("rope_parameters") or {}
        if len(ropes) == 1 and "rope_theta" in given:
            found[family] = config, next(iter(ropes)).dims
    return found


PLAIN = plain_ropes()


def test_most_families_rotate_all_layers_alike() -> None:
    assert len(PLAIN) >= 20


@pytest.mark.parametrize("family", PLAIN)
def test_scaling_of_every_kind_has_the_frequencies_of_the_reference_library(family: str) -> None:
    config, dims = PLAIN[family]
    for kind, settings in KINDS.items():
        given = {**config["rope_parameters"], "rope_type": kind, **settings}
        if kind == "longrope":
            given |= {"short_factor": [1.0 + 0.1 * pair for pair in range(dims // 2)]}
            given |= {"long_factor": [1.5 + pair for pair in range(dims // 2)]}
        changed = {**config, "rope_parameters": given, "max_position_embeddings": SIZES["max_position_embeddings"]}
        if kind in REJECTED:
            with pytest.raises(UnsupportedModel, match=kind):
                ropes_of(changed)
            continue
        (rope,) = ropes_of(changed)
        frequencies, scale = inverse_frequencies(rope, num_positions=64)
        theirs = TABLE[family].config(**(changed | {"original_max_position_embeddings": TRAINED}))
        reference, reference_scale = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"), seq_len=64)
        torch.testing.assert_close(frequencies, reference[: len(frequencies)], rtol=1e-5, atol=0, msg=kind)
        assert scale == pytest.approx(reference_scale), kind


def described(architecture: Architecture) -> tuple[Any, ...]:
    """All of it, with the frequencies of each rotation in place of the settings that they are computed from."""
    layers: list[tuple[LayerConfig, tuple[list[float], float] | None]] = []
    for layer in architecture.layers:
        if not isinstance(layer.mixer, KV_MIXERS):
            layers.append((layer, None))
            continue
        rope = layer.mixer.rope
        frequencies = None if rope is None else _frequencies(rope)
        layers.append((replace(layer, mixer=replace(layer.mixer, rope=RopeConfig(0))), frequencies))
    return architecture.config, architecture.ends, layers


@cache
def _frequencies(rope: RopeConfig) -> tuple[list[float], float]:
    frequencies, scale = inverse_frequencies(rope, num_positions=64)
    return frequencies.tolist(), scale


@pytest.mark.parametrize(("family", "name"), CASES)
def test_option_that_a_config_leaves_out_means_what_the_reference_library_takes_for_it(family: str, name: str) -> None:
    """Or the config is rejected, because nobody can know the value."""
    entry = TABLE[family]
    whole = entry.config_of(name).to_dict()
    text = whole if entry.tower is None else whole["text_config"]
    read_architecture(whole)
    accepted = set()
    for option in text.keys() - {"model_type"} - LIBRARY_ONLY:
        rest = {key: value for key, value in text.items() if key != option}
        given = rest if entry.tower is None else {**whole, "text_config": rest}
        try:
            ours = read_architecture(given)
            theirs = entry.config(**given).to_dict()
        except (UnsupportedModel, StrictDataclassError):
            continue
        accepted.add(option)
        assert described(ours) == described(read_architecture(theirs)), option
    assert {"num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "hidden_act"} & accepted


WINDOWED = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("qwen3", {**WINDOWED, "sliding_window": None}, "no 'sliding_window'"),
        ("qwen3", {**WINDOWED, "sliding_window": 0}, "0 for 'sliding_window'"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 4 experts"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("qwen3_next", {**tiny_delta(), "layer_types": ["linear_attention", "mamba"]}, "layer_types"),
        ("qwen3_next", {**tiny_delta(), "layer_types": ["linear_attention"]}, "layer_types"),
        ("qwen3_next", tiny_delta(linear_key_head_dim=None), "linear_key_head_dim"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"hidden_activation": "relu"}, "hidden_act 'relu'"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("gemma4_text", {"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
        ("gemma4_text", {"vocab_size_per_layer_input": 9}, "vocab_size_per_layer_input is 9"),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2 of 2 layers"),
        ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1: no layer before has full_attention"),
        ("gemma4_text", {"per_layer_config": {"1": {"sliding_window": 3}}}, "per_layer_config has 'sliding_window'"),
        ("gemma4_text", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "cannot share 3 key-value heads"),
        ("gemma4_text", {"enable_moe_block": True, "top_k_experts": 5}, "asks for 5 of 4 experts"),
        ("gemma4_unified", {}, "no 'text_config'"),
        ("glm4_moe", {"n_group": 2}, "n_group is 2"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 3}, "3 of 2 experts"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"n_group": 3, "first_k_dense_replace": 0}, "2 of 4 experts in 4 of 3 groups"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name 2 layers"),
        ("youtu", {"q_lora_rank": None, "attention_bias": True}, "attention_bias is true without q_lora_rank"),
        ("youtu", {"partial_rotary_factor": 0.5}, "rotates 32 of 64 dimensions"),
        ("laguna", {"gating": "per-token"}, "gating is 'per-token'"),
        ("laguna", {"num_attention_heads_per_layer": [4, 3]}, "3 attention heads of layer 1"),
        ("laguna", {"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping is 5.0"),
        ("muse_glimmer_text", {"post_norm_eps": 1e-5}, "post_norm_eps is 1e-05"),
        ("muse_glimmer_text", {"layer_rope_theta": [0]}, "layer_rope_theta must have 2 values"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
        ("minimax_m2", {"num_local_experts": 1 << 13}, "8192 experts"),
        ("mellum", {"mlp_layer_types": ["sparse", "wide"]}, "mlp_layer_types must name 2 layers"),
        ("granite", {"residual_multiplier": 0.0}, "0.0 for 'residual_multiplier'"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 values for 2 layers"),
        ("olmo3", {"layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "6 positive values in 'short_factor'"),
        ("glm4", {"partial_rotary_factor": 0.1}, "rotates 1 of 12 dimensions"),
        ("mistral3", {}, "no 'text_config'"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block is False"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla is True"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias is True"),
        ("ernie4_5_moe", {"moe_gate": "hash"}, "moe_gate is 'hash'"),
        ("lfm2", {"use_pos_enc": False}, "use_pos_enc is False"),
        ("lfm2", {"conv_bias": True}, "conv_bias is True"),
        ("lfm2", {"layer_types": ["conv", "mamba"]}, "layer_types must name 2 layers"),
        ("lfm2", {"full_attn_idxs": 1}, "full_attn_idxs is 1"),
        ("granitemoehybrid", {"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        *(
            ("granitemoehybrid", {"time_step_limit": limits}, "time_step_limit is")
            for limits in ([0.001, 0.1], [0, 1e9], [0, float("nan")], [0, {"__float__": "NaN"}], [0, [1e308]])
        ),
        ("granitemoehybrid", {"mamba_n_heads": 7}, "7 Mamba heads of 13 values in 1 groups do not divide 96"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "layers of the type 'X'"),
        ("nemotron_h", {"hybrid_override_pattern": "M", "use_bias": True}, "use_bias is True"),
        ("nemotron_h", {"hybrid_override_pattern": "E", "n_group": 2}, "n_group is 2"),
        ("nemotron_h", {"hybrid_override_pattern": "-", "mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'"),
        ("nemotron_h", {}, "neither 'layers_block_type' nor 'hybrid_override_pattern'"),
    ],
)
def test_rejects_an_option_that_is_not_implemented_by_name_and_value(
    family: str, changes: dict[str, Any], message: str
) -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
    with pytest.raises(UnsupportedModel, match=message):
        read_architecture({"model_type": family, **SIZES, **experts, **changes})


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [True, True, True, True]),
        ({"mlp_only_layers": [0, 3]}, [False, True, True, False]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"mlp_only_layers": None, "decoder_sparse_step": 3}, [False, False, True, False]),
    ],
)
def test_config_selects_the_layers_with_experts(changes: dict[str, Any], sparse: list[bool]) -> None:
    config = {"model_type": "qwen3_moe", **SIZES, **tiny_experts(), "num_hidden_layers": 4, **changes}
    assert [isinstance(layer.feed_forward, MoEConfig) for layer in read_architecture(config).layers] == sparse


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("hunyuan_v1_dense", {"norm_type": "hf_rms"}),
        *(
            ("granitemoehybrid", {"time_step_limit": [0.0, limit]})
            for limit in (float("inf"), 1e308, 1e30, sys.float_info.max, "inf", {"__float__": "Infinity"})
        ),
    ],
)
def test_other_spelling_of_an_option_means_what_leaving_it_out_does(family: str, changes: dict[str, Any]) -> None:
    config = TABLE[family].config_of(next(iter(TABLE[family].changes))).to_dict()
    rest = {name: value for name, value in config.items() if name not in changes}
    assert described(read_architecture(rest | changes)) == described(read_architecture(rest))


NO_EFFECT = {
    *LIBRARY_ONLY,
    *("use_cache", "architectures", "output_router_logits", "pad_token_id", "residual_in_fp32", "moe_norm_min"),
    *("chunk_size", "mamba_chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap"),
    *("model_type", "time_step_max", "time_step_floor", "expand"),
    # lists and other options in the config say it
    *("use_sliding_window", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern"),
    *("no_rope_layer_interval", "original_max_position_embeddings", "rotary_dim", "qk_head_dim", "tie_word_embeddings"),
    *("block_multiple_of", "block_ffn_dim_multiplier", "moe_layer_end_index", "num_nextn_predict_layers"),
    # of parts that this model does not have
    *("sliding_window", "vocab_size_per_layer_input", "use_double_wide_mlp", "intermediate_size", "head_dim"),
    *("num_key_value_heads", "attention_bias", "mamba_proj_bias", "n_group", "topk_group", "norm_topk_prob"),
    *("num_experts", "num_experts_per_tok", "top_k_experts", "moe_intermediate_size", "n_routed_experts"),
    *("n_shared_experts", "moe_shared_expert_intermediate_size", "moe_latent_size", "routed_scaling_factor"),
}
"""Options that do not change a result of the reference library in at least one of the models here."""


@pytest.mark.parametrize(("family", "name"), CASES)
def test_another_value_of_an_option_changes_the_model_or_is_rejected(family: str, name: str) -> None:
    """Unless it has no effect in the reference library either."""
    entry = TABLE[family]
    whole = entry.config_of(name).to_dict()
    text = whole if entry.tower is None else whole["text_config"]
    usual = described(read_architecture(whole))
    ignored = set()
    for option, value in list(text.items()):
        if option in NO_EFFECT or not isinstance(value, bool | int | float | str):
            continue
        text[option] = not value if isinstance(value, bool) else "relu" if isinstance(value, str) else value * 2 + 1
        try:
            if described(read_architecture(whole)) == usual:
                ignored.add(option)
        except UnsupportedModel:
            pass
        text[option] = value
    if not read_architecture(whole).is_recurrent:
        ignored = {option for option in ignored if not option.startswith("mamba_")}
    assert not ignored


def is_bounded(architecture: Architecture) -> bool:
    blocks = [block for layer in architecture.layers for block in (layer.feed_forward, layer.experts)]
    num_tower_layers = 0 if architecture.tower is None else architecture.tower.layers
    return all(block.experts < 10_000 for block in blocks if isinstance(block, MoEConfig)) and num_tower_layers < 10_000


DAMAGED = ("x", None, 0, -1, [1], {"a": 1}, float("nan"), 1 << 40, 10**30)


@pytest.mark.parametrize("family", TABLE)
def test_damaged_value_of_any_option_is_read_or_rejected(family: str) -> None:
    """No other error leaves the registry, whatever an option holds, and what is computed layer by layer or expert by
    expert has a bound."""
    whole = TABLE[family].config_of(list(TABLE[family].changes)[-1]).to_dict()
    text = whole if TABLE[family].tower is None else whole["text_config"]
    ropes = text.get("rope_parameters") or {}
    num_rejected = 0
    tower = whole.get("vision_config") or {}
    usual = described(read_architecture(whole))
    for options in (text, ropes, tower, *(part for part in ropes.values() if isinstance(part, dict))):
        for option, value in list(options.items()):
            for damaged in DAMAGED[:1] if option in LIBRARY_ONLY else DAMAGED:
                options[option] = damaged
                try:
                    architecture = read_architecture(whole)
                except UnsupportedModel:
                    num_rejected += 1
                else:
                    assert is_bounded(architecture), (option, damaged)
                    assert option not in LIBRARY_ONLY or described(architecture) == usual, option
            options[option] = value
    read_architecture(whole)
    assert num_rejected > 50
