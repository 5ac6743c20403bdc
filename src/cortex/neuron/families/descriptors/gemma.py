"""Gemma 3 and 4, and EmbeddingGemma."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from cortex.neuron.families.family import ModelFamily, ReasoningMarkers
from cortex.neuron.families.gguf import (
    AROUND_BLOCKS,
    MAX_EXPERTS,
    GGUFArchitecture,
    GGUFKeys,
    optional_number,
    ropes_by_type,
)
from cortex.neuron.families.tool_calls import CallFrame, ToolSyntax
from cortex.neuron.pictures.spec import PictureDefaults, PictureText

_GEMMA3_27B_LAYERS: Final = 62
"""The one Gemma 3 whose attention scale does not follow from its head width; files do not contain it."""


def _gemma3(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    is_27b = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    width = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        **keys.windows(config["num_hidden_layers"], 6),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width,
        "final_logit_softcapping": optional_number(keys, "final_logit_softcapping"),
        "rope_parameters": ropes_by_type(config, keys.number("rope.freq_base_swa", 10_000.0)),
    }


def _embedding_gemma(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gemma3(keys, config), "use_bidirectional_attention": True}


def _gemma4(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Head options of files describe layers without a window; those of other layers have separate names."""
    num_layers, inner = config["num_hidden_layers"], config["intermediate_size"]
    windows = keys.windows(num_layers, 6)
    full = [layer for layer, kind in enumerate(windows["layer_types"]) if kind == "full_attention"]
    kv_heads = keys.counts("attention.head_count_kv", num_layers, config["num_attention_heads"])
    num_readers = (
        keys.count("attention.shared_kv_layers", limit=num_layers - 1) if keys.has("attention.shared_kv_layers") else 0
    )
    inners, widths = keys.counts("feed_forward_length", num_layers), [inner] * num_layers
    is_wide = inners[-1] == 2 * inner
    if is_wide:
        widths[num_layers - num_readers :] = [2 * inner] * num_readers
    if inners != widths:
        raise keys.unsupported("feed_forward_length", "only the layers without KV of their own may be twice as wide")
    head_dim = keys.count("attention.key_length_swa", config["head_dim"])
    if keys.count("rope.dimension_count_swa", head_dim) != head_dim:
        raise keys.unsupported("rope.dimension_count_swa", f"only all {head_dim} dimensions of a head are supported")
    options = {
        **windows,
        "head_dim": head_dim,
        "per_layer_config": {
            str(layer): {
                "head_dim": config["head_dim"] if layer in full else head_dim,
                "num_key_value_heads": kv_heads[layer],
            }
            for layer in range(num_layers)
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": optional_number(keys, "final_logit_softcapping"),
        "attention_k_eq_v": bool(full) and not keys.has_tensor(f"blk.{full[0]}.attn_v.weight"),
        "num_kv_shared_layers": num_readers,
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": ropes_by_type(config, keys.number("rope.freq_base_swa", 10_000.0)),
        "rope_scaling": None,
    }
    if keys.has("embedding_length_per_layer_input"):
        options["hidden_size_per_layer_input"] = keys.count("embedding_length_per_layer_input")
        options["vocab_size_per_layer_input"] = config["vocab_size"]
    if keys.has("expert_count"):
        options |= {
            "enable_moe_block": True,
            "num_experts": keys.count("expert_count", limit=MAX_EXPERTS),
            "top_k_experts": keys.count("expert_used_count"),
            "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        }
    return options


def _beside_tower(text: Mapping[str, Any]) -> dict[str, Any]:
    """In the larger models, positions of a picture see each other; files do not contain this."""
    return {} if text.get("hidden_size_per_layer_input") else {"use_bidirectional_attention": "vision"}


_GEMMA3_TEXT: Final = ModelFamily(
    ("gemma3_text",),
    "Gemma 3, EmbeddingGemma",
    gguf=(
        GGUFArchitecture("gemma3", _gemma3, AROUND_BLOCKS, norms="plus_one"),
        GGUFArchitecture("gemma-embedding", _embedding_gemma, AROUND_BLOCKS, norms="plus_one", pools=True),
    ),
)
_GEMMA4_TEXT: Final = ModelFamily(
    ("gemma4_text",),
    "Gemma 4",
    tensor_names={
        # Experts are parallel to the feed-forward block. Layers have them in it, and so have GGUF files.
        ".mlp.experts.": ".mlp.experts.",
        ".experts.": ".mlp.experts.",
        ".router.proj.": ".mlp.gate.",
        ".router.scale": ".mlp.gate.input_scale",
        ".router.per_expert_scale": ".mlp.gate.expert_scale",
    },
    tool_syntaxes=(
        ToolSyntax(
            "gemma",
            "unquoted",
            (("<|tool_call>",),),
            frame=CallFrame("<|tool_call>", "", "", "<tool_call|>", is_control=True),
        ),
    ),
    reasoning=ReasoningMarkers("<|channel>thought", "<channel|>"),
    gguf=(
        GGUFArchitecture(
            "gemma4",
            _gemma4,
            {
                **AROUND_BLOCKS,
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
                "inp_gate": "per_layer_input_gate",
                "proj": "per_layer_projection",
                "post_norm": "post_per_layer_input_norm",
            },
            sizes_by_layer=True,
        ),
    ),
)
_GEMMA4_PICTURES: Final = PictureDefaults(
    "budget",
    PictureText("<|image|>", "<|image|>", before="<|image>", after="<image|>"),
    most=280,
    merge=3,
    choices=(70, 140, 280, 560, 1120),
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
)
_GEMMA4: Final = replace(
    _GEMMA4_TEXT,
    model_types=("gemma4",),
    gguf=(),
    pictures=_GEMMA4_PICTURES,
    tower="gemma4",
    projectors={"gemma4v": ("gemma4_text",)},
    beside_tower=_beside_tower,
)

FAMILIES: Final = (
    _GEMMA3_TEXT,
    ModelFamily(
        ("gemma3",),
        "Gemma 3",
        pictures=PictureDefaults(
            "square",
            PictureText(
                "<start_of_image>", "<image_soft_token>", before="\n\n<start_of_image>", after="<end_of_image>\n\n"
            ),
            most=896,
            patch=14,
            merge=4,
            resample="bilinear",
        ),
        tower="siglip",
        projectors={"gemma3": ("gemma3_text",)},
    ),
    _GEMMA4_TEXT,
    replace(_GEMMA4_TEXT, model_types=("gemma4_unified_text",), gguf=()),
    _GEMMA4,
    replace(
        _GEMMA4,
        model_types=("gemma4_unified",),
        # No picture is longer than the window of its layers, so that all of it is seen there.
        pictures=replace(_GEMMA4_PICTURES, choices=_GEMMA4_PICTURES.choices[:4]),
        tower="gemma4_unified",
        projectors={"gemma4uv": ("gemma4_text",)},
        beside_tower=lambda _text: {},
    ),
)
