"""A short chat template for each syntax of tool calls: ChatML that mentions the markers."""

from __future__ import annotations

from cortex.neuron.families.tool_calls import ToolSyntax
from cortex.neuron.text.template.chat_template import CHATML

from .syntax_names import S

MENTIONS = {
    S.HARMONY: "<|channel|>final<|message|>",
    S.MUSE_XML: '<atem:function_calls><atem:invoke name="',
    S.MINIMAX_XML: '<minimax:tool_call><invoke name="',
    S.SEED_XML: "<seed:tool_call><function=",
    S.GLM_XML: "<tool_call><arg_key>",
    S.QWEN_XML: "<tool_call><function=",
    S.DSML: "<｜DSML｜function_calls>",
    S.DSML_CALLS: "<｜DSML｜tool_calls>",
    S.DEEPSEEK_BLOCK: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    S.DEEPSEEK: "<｜tool▁call▁begin｜><｜tool▁sep｜>",
    S.KIMI: "<|tool_call_begin|><|tool_call_argument_begin|>",
    S.SOLAR: "<|tool_call:begin|><|tool_call:args|>",
    S.MISTRAL: "[TOOL_CALLS][ARGS]",
    S.MISTRAL_JSON: "[TOOL_CALLS]",
    S.LFM2: "<|tool_call_start|>",
    S.OLMO: "<function_calls>",
    S.GEMMA: "<|tool_call>",
    S.PHI_JSON: "<|tool_call|><|/tool_call|>",
    S.GRANITE_JSON: "<|tool_call|>",
    S.COHERE_JSON: "<|START_ACTION|>",
    S.HUNYUAN_JSON: "<tool_calls>",
    S.HERMES_JSON: "<tool_call>",
    S.NEMOTRON_JSON: "<TOOLCALL>",
    S.GIGACHAT_JSON: "<|function_call|>",
    S.NAME_LINE: "<|observation|>{# metadata #}",
    S.LLAMA_JSON: "<|python_tag|>",
    S.PLAIN_JSON: "",
}


def template_of(syntax: ToolSyntax) -> str:
    return "{{ tools }}{% if false %}" + MENTIONS[syntax] + "{% endif %}" + CHATML
