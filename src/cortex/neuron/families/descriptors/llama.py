"""Llama, and the families with its tensors: SmolLM3, Seed-OSS, Hunyuan, OLMo and EXAONE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.family import THINK, ModelFamily, ReasoningMarkers
from cortex.neuron.families.gguf import AFTER_BLOCKS, GGUFArchitecture, GGUFKeys, ropes_by_type
from cortex.neuron.families.splits import CL100K_WHOLE, DIGITS, GPT2, O200K, ONE_DIGIT, THREE_PASSES, Split, words
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
    "olmo", "python", (("<function_calls>",),), frame=CallFrame("<function_calls>", "", "", "</function_calls>")
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
        "rope_parameters": ropes_by_type(config, keys.number("rope.freq_base_swa", config["rope_theta"])),
    }


def _seed_oss(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    del config
    return {"attention_out_bias": keys.has_tensor("blk.0.attn_output.bias")}


FAMILIES: Final = (
    ModelFamily(
        ("llama",),
        "Llama 1 to 3.3, SmolLM2",
        tool_syntaxes=(LLAMA_JSON, HERMES_JSON),
        reasoning=THINK,
        pretokenizers={**dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), CL100K_WHOLE), "llama4": O200K},
        gguf=(GGUFArchitecture("llama", is_interleaved=True),),
    ),
    ModelFamily(
        ("smollm3",),
        "SmolLM3",
        reasoning=THINK,
        pretokenizers={"smollm": DIGITS},
        gguf=(GGUFArchitecture("smollm3", is_interleaved=True),),
    ),
    ModelFamily(
        ("seed_oss",),
        "Seed-OSS",
        tool_syntaxes=(_SEED_XML,),
        reasoning=ReasoningMarkers("<seed:think>", "</seed:think>"),
        pretokenizers={"seed-coder": Split((words(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}\r\n]+"),))},
        gguf=(GGUFArchitecture("seed_oss", _seed_oss, {"post_attention_norm": "post_attention_layernorm"}),),
    ),
    ModelFamily(
        ("hunyuan_v1_dense",),
        "Hunyuan, dense",
        tensor_names={
            ".self_attn.query_layernorm.": ".self_attn.q_norm.",
            ".self_attn.key_layernorm.": ".self_attn.k_norm.",
        },
        tool_syntaxes=(framed_json("hunyuan_json", "<tool_calls>", "</tool_calls>"),),
        reasoning=THINK,
        pretokenizers={"hunyuan": ONE_DIGIT, "hunyuan-dense": THREE_PASSES},
        gguf=(GGUFArchitecture("hunyuan-dense"),),
    ),
    ModelFamily(
        ("olmo2",), "OLMo 2", pretokenizers={"olmo": GPT2}, gguf=(GGUFArchitecture("olmo2", _olmo2, AFTER_BLOCKS),)
    ),
    ModelFamily(("olmo3",), "OLMo 3", tool_syntaxes=(_OLMO_CALLS,), reasoning=THINK, also_gguf=("olmo2",)),
    ModelFamily(
        ("exaone4",),
        "EXAONE 4",
        reasoning=THINK,
        pretokenizers={"exaone": DIGITS, "exaone4": GPT2},
        gguf=(GGUFArchitecture("exaone4", _exaone4, AFTER_BLOCKS),),
    ),
)
