"""Llama, and the families with its tensors: SmolLM3, Seed-OSS, Phi-3, Hunyuan, OLMo and EXAONE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.family import THINK, ModelFamily, ReasoningMarkers
from cortex.neuron.families.gguf import AFTER_BLOCKS, FUSED, GGUFArchitecture, GGUFKeys, ropes_by_type
from cortex.neuron.families.splits import (
    CL100K_WHOLE,
    DIGITS,
    GPT2,
    O200K,
    ONE_DIGIT,
    THREE_PASSES,
    Split,
    words,
)
from cortex.neuron.families.tool_calls import (
    HERMES_JSON,
    PYTHON_TAG,
    CallFrame,
    TagForm,
    ToolSyntax,
    framed_json,
    tagged,
)

LLAMA_JSON: Final = ToolSyntax("llama_json", "python_tag", ((PYTHON_TAG,),), precedence=5, keys=("name", "parameters"))
_SEED_XML: Final = tagged(
    "seed_xml",
    "<seed:tool_call>",
    form=TagForm(
        CallFrame("<seed:tool_call>", "\n", "\n", "</seed:tool_call>"),
        *("<function=", ">", "</function>"),
        *("<parameter=", (">",), "</parameter>"),
    ),
)
_OLMO_CALLS: Final = ToolSyntax(
    "olmo",
    "python",
    (("<function_calls>",),),
    frame=CallFrame("<function_calls>", "", "", "</function_calls>"),
)
_PHI_JSON: Final = ToolSyntax(
    "phi_json",
    markers=(("<|tool_call|>", "<|/tool_call|>"),),
    frame=CallFrame("<|tool_call|>", "[", "]", "<|/tool_call|>", is_control=True),
)


def _exaone4(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    return keys.windows(config["num_hidden_layers"], 4)


def _olmo2(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """OLMo 2 or, with windows, OLMo 3."""
    if not keys.has("attention.sliding_window"):
        return {}
    return {
        **keys.windows(config["num_hidden_layers"], 4),
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "rope_parameters": ropes_by_type(config, keys.number("rope.freq_base_swa", config["rope_theta"])),
    }


def _phi3(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = keys.count("attention.sliding_window") if keys.has("attention.sliding_window") else None
    return {"original_max_position_embeddings": original, "sliding_window": window}


def _seed_oss(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    del config
    return {"attention_out_bias": keys.has_tensor("blk.0.attn_output.bias")}


FAMILIES: Final = (
    ModelFamily(
        ("llama",),
        tool_syntaxes=(LLAMA_JSON, HERMES_JSON),
        reasoning=THINK,
        pretokenizers={**dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), CL100K_WHOLE), "llama4": O200K},
        gguf=(GGUFArchitecture("llama", "LlamaForCausalLM", is_interleaved=True),),
    ),
    ModelFamily(
        ("smollm3",),
        reasoning=THINK,
        pretokenizers={"smollm": DIGITS},
        gguf=(GGUFArchitecture("smollm3", "SmolLM3ForCausalLM", is_interleaved=True),),
    ),
    ModelFamily(
        ("seed_oss",),
        tool_syntaxes=(_SEED_XML,),
        reasoning=ReasoningMarkers("<seed:think>", "</seed:think>"),
        pretokenizers={"seed-coder": Split((words(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),))},
        gguf=(
            GGUFArchitecture(
                "seed_oss", "SeedOssForCausalLM", _seed_oss, {"post_attention_norm": "post_attention_layernorm"}
            ),
        ),
    ),
    ModelFamily(
        ("phi3",),
        tool_syntaxes=(_PHI_JSON, HERMES_JSON),
        reasoning=THINK,
        gguf=(GGUFArchitecture("phi3", "Phi3ForCausalLM", _phi3, FUSED, rotates_part=True),),
    ),
    ModelFamily(
        ("hunyuan_v1_dense",),
        tensor_names={
            ".self_attn.query_layernorm.": ".self_attn.q_norm.",
            ".self_attn.key_layernorm.": ".self_attn.k_norm.",
        },
        tool_syntaxes=(framed_json("hunyuan_json", "<tool_calls>", "</tool_calls>"),),
        reasoning=THINK,
        pretokenizers={"hunyuan": ONE_DIGIT, "hunyuan-dense": THREE_PASSES},
        gguf=(GGUFArchitecture("hunyuan-dense", "HunYuanDenseV1ForCausalLM"),),
    ),
    ModelFamily(
        ("olmo2",),
        pretokenizers={"olmo": GPT2},
        gguf=(GGUFArchitecture("olmo2", "Olmo2ForCausalLM", _olmo2, AFTER_BLOCKS),),
    ),
    ModelFamily(("olmo3",), tool_syntaxes=(_OLMO_CALLS,), reasoning=THINK, also_gguf=("olmo2",)),
    ModelFamily(
        ("exaone4",),
        reasoning=THINK,
        pretokenizers={"exaone": DIGITS, "exaone4": GPT2},
        gguf=(GGUFArchitecture("exaone4", "Exaone4ForCausalLM", _exaone4, AFTER_BLOCKS),),
    ),
)
