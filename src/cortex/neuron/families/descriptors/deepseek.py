"""DeepSeek V2 and V3, and the families with its layers: Kimi K2 and Youtu."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cortex.neuron.families.family import THINK, ModelFamily
from cortex.neuron.families.gguf import (
    FLOAT32_DIGITS,
    SHARED_EXPERT,
    SIGMOID,
    SOFTMAX,
    GGUFArchitecture,
    GGUFKeys,
    check_scoring,
    num_dense,
    optional_count,
)
from cortex.neuron.families.splits import KANJI_AND_KANA, SYMBOLS, THREE_PASSES, Split, any_of, cased_words
from cortex.neuron.families.tool_calls import CallFrame, ToolSyntax, named_form

SHARED_NAMES: Final = {".mlp.shared_experts.": ".mlp.shared_expert."}
_HEAD: Final = "(?:<｜tool▁call▁begin｜>)? (?:function <｜tool▁sep｜>)? NAME (?:<｜tool▁sep｜>)? (?:```(?:json)?)?"
_SECTION: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SYNTAXES: Final = (
    ToolSyntax(
        "deepseek",
        "named",
        (("<｜tool▁sep｜>",),),
        frame=CallFrame("<｜tool▁call▁begin｜>", "", "", "<｜tool▁call▁end｜>", is_control=True, section=_SECTION),
        named=named_form(_HEAD, between=("<｜tool▁sep｜>",)),
    ),
    ToolSyntax(
        "deepseek_block",
        "named",
        (("<｜tool▁sep｜>", "```json"),),
        frame=CallFrame("<｜tool▁call▁begin｜>", "", "\n```", "<｜tool▁call▁end｜>", is_control=True, section=_SECTION),
        named=named_form(_HEAD, before=("function", "<｜tool▁sep｜>"), between=("\n```json\n",)),
    ),
)
_KIMI_CALLS: Final = ToolSyntax(
    "kimi",
    "named",
    (("<|tool_call_argument_begin|>",),),
    frame=CallFrame(
        *("<|tool_call_begin|>", "", "", "<|tool_call_end|>"),
        is_control=True,
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    named=named_form(
        r"(?:<\|tool_call_begin\|>)? (?:functions\.)?NAME(?::\d+)? (?:<\|tool_call_argument_begin\|>)?",
        before=("functions.",),
        between=(":0", "<|tool_call_argument_begin|>"),
    ),
)
_CASED_LETTERS: Final = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
"""The letters with an upper and a lower case that the first tokenizers keep together, as ranges of code points.
Unicode has more of them, such as the lower-case Armenian ones."""
_EAST_ASIAN: Final = f"{any_of('800-9FA5 AC00-D7FF')}+"
_PRETOKENIZERS: Final = {
    "deepseek-llm": Split(
        (
            r"[\r\n]",
            rf"\s?{any_of(_CASED_LETTERS)}+",
            rf"\s?{any_of('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}+",
            r"\s+$",
            _EAST_ASIAN,
        ),
        single_digits=True,
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN), single_digits=True),
    "deepseek-v3": THREE_PASSES,
}
_KIMI_WORDS: Final = r"\p{Han}+|" + cased_words(
    r"\p{N}{1,3}",
    upper=r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    lower=r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    symbols=rf"{SYMBOLS}[\r\n]*",
)
_YOUTU_WORDS: Final = f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f︰-﹏]+|[ㄅ-ㄯ]+|{KANJI_AND_KANA}"


def _deepseek2(keys: GGUFKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek V3, Kimi K2 and GLM-4.7-Flash or, with a softmax router, DeepSeek V2. Files name the sizes of latents as
    those of a head, older ones those of a head itself."""
    dense, rope_dims = num_dense(keys), keys.count("rope.dimension_count")
    groups = keys.count("expert_group_count", 1)
    kept = keys.count("expert_group_used_count", 1) if groups > 1 else 1
    query_dim = keys.count("attention.key_length_mla", config["head_dim"])
    if query_dim <= rope_dims:
        raise keys.malformed(f"rotates {rope_dims} of {query_dim} dimensions of a head")
    has_bias = keys.has_tensor(f"blk.{dense}.exp_probs_b.bias")
    is_sigmoid = keys.count("expert_gating_func", SIGMOID if has_bias else SOFTMAX) == SIGMOID
    check_scoring(keys, SIGMOID if is_sigmoid else SOFTMAX)
    scaling = dict(config["rope_scaling"] or {})
    if "mscale" in scaling:  # files have a tenth of it
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(scaling["mscale"] * 10, FLOAT32_DIGITS))
    options = {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope_dims,
        "partial_rotary_factor": 1.0,
        "rope_scaling": scaling or None,
        "q_lora_rank": keys.count("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": query_dim - rope_dims,
        "qk_rope_head_dim": rope_dims,
        "v_head_dim": keys.count("attention.value_length_mla", keys.count("attention.value_length")),
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": optional_count(keys, "expert_shared_count"),
        "n_group": groups,
        "topk_group": kept,
        "first_k_dense_replace": dense,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", default=False),
    }
    if is_sigmoid:
        return options
    method = "group_limited_greedy" if groups > kept else "greedy"
    return {**options, "model_type": "deepseek_v2", "topk_method": method}


FAMILIES: Final = (
    ModelFamily(
        ("deepseek_v3",),
        "DeepSeek V3, R1",
        tensor_names=SHARED_NAMES,
        tool_syntaxes=_SYNTAXES,
        reasoning=THINK,
        pretokenizers=_PRETOKENIZERS,
        gguf=(
            GGUFArchitecture(
                "deepseek2",
                _deepseek2,
                {
                    **SHARED_EXPERT,
                    "attn_q_a": "self_attn.q_a_proj",
                    "attn_q_a_norm": "self_attn.q_a_layernorm",
                    "attn_q_b": "self_attn.q_b_proj",
                    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                    "attn_kv_b": "self_attn.kv_b_proj",
                    "attn_k_b": "self_attn.k_b_proj",
                    "attn_v_b": "self_attn.v_b_proj",
                },
                is_mixture=True,
                rotates_part=True,
                head="layer",
            ),
        ),
    ),
    ModelFamily(("deepseek_v2",), "DeepSeek V2", tensor_names=SHARED_NAMES, also_gguf=("deepseek2",)),
    ModelFamily(
        ("kimi_k2",),
        "Kimi K2",
        tensor_names=SHARED_NAMES,
        tool_syntaxes=(_KIMI_CALLS,),
        reasoning=THINK,
        pretokenizers={"kimi-k2": Split((_KIMI_WORDS,))},
        also_gguf=("deepseek2",),
    ),
    ModelFamily(
        ("youtu",),
        "Youtu-LLM",
        pretokenizers={"youtu": Split((_YOUTU_WORDS, cased_words(r"\p{N}")), whole_words_first=True)},
    ),
)
