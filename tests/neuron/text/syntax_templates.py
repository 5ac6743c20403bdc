"""A short chat template for each syntax of tool calls: ChatML that mentions the markers."""

from __future__ import annotations

from cortex.neuron.text.output.detect import ToolSyntax
from cortex.neuron.text.template.chat_template import CHATML

MENTIONS = {
    ToolSyntax.HARMONY: "<|channel|>final<|message|>",
    ToolSyntax.MUSE_XML: '<atem:function_calls><atem:invoke name="',
    ToolSyntax.MINIMAX_XML: '<minimax:tool_call><invoke name="',
    ToolSyntax.SEED_XML: "<seed:tool_call><function=",
    ToolSyntax.GLM_XML: "<tool_call><arg_key>",
    ToolSyntax.QWEN_XML: "<tool_call><function=",
    ToolSyntax.DSML: "<｜DSML｜function_calls>",
    ToolSyntax.DSML_CALLS: "<｜DSML｜tool_calls>",
    ToolSyntax.DEEPSEEK_BLOCK: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    ToolSyntax.DEEPSEEK: "<｜tool▁call▁begin｜><｜tool▁sep｜>",
    ToolSyntax.KIMI: "<|tool_call_begin|><|tool_call_argument_begin|>",
    ToolSyntax.SOLAR: "<|tool_call:begin|><|tool_call:args|>",
    ToolSyntax.MISTRAL: "[TOOL_CALLS][ARGS]",
    ToolSyntax.MISTRAL_JSON: "[TOOL_CALLS]",
    ToolSyntax.LFM2: "<|tool_call_start|>",
    ToolSyntax.OLMO: "<function_calls>",
    ToolSyntax.GEMMA: "<|tool_call>",
    ToolSyntax.PHI_JSON: "<|tool_call|><|/tool_call|>",
    ToolSyntax.GRANITE_JSON: "<|tool_call|>",
    ToolSyntax.COHERE_JSON: "<|START_ACTION|>",
    ToolSyntax.HUNYUAN_JSON: "<tool_calls>",
    ToolSyntax.HERMES_JSON: "<tool_call>",
    ToolSyntax.NEMOTRON_JSON: "<TOOLCALL>",
    ToolSyntax.GIGACHAT_JSON: "<|function_call|>",
    ToolSyntax.NAME_LINE: "<|observation|>{# metadata #}",
    ToolSyntax.LLAMA_JSON: "<|python_tag|>",
    ToolSyntax.PLAIN_JSON: "",
}


def template_of(syntax: ToolSyntax) -> str:
    return "{{ tools }}{% if false %}" + MENTIONS[syntax] + "{% endif %}" + CHATML
