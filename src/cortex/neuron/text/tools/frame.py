"""What is written around a call, in the syntaxes that have markers for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cortex.neuron.text.output.detect import TOOL_CALL_CLOSE, TOOL_CALL_OPEN, ToolSyntax


@dataclass(frozen=True, slots=True)
class CallFrame:
    """The markers around a call, and the layout between them and the call."""

    opening: str
    before: str
    after: str
    closing: str
    """Empty if the end of the call says enough."""
    is_control: bool = False
    """Whether the markers are control tokens, which are never text."""
    section: tuple[str, ...] = ()
    """The markers before the first call of a turn and after the last."""

    @property
    def openings(self) -> tuple[str, ...]:
        """What begins a call: its own marker, or that of all calls."""
        return (self.opening, *self.section[:1])

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, *((self.closing,) if self.closing else ()), *self.section)


FRAMES: Final[Mapping[ToolSyntax, CallFrame]] = {
    ToolSyntax.HERMES_JSON: CallFrame(TOOL_CALL_OPEN, "\n", "\n", TOOL_CALL_CLOSE),
    ToolSyntax.QWEN_XML: CallFrame(TOOL_CALL_OPEN, "\n", "\n", TOOL_CALL_CLOSE),
    ToolSyntax.GLM_XML: CallFrame(TOOL_CALL_OPEN, "", "", TOOL_CALL_CLOSE),
    ToolSyntax.SEED_XML: CallFrame("<seed:tool_call>", "\n", "\n", "</seed:tool_call>"),
    ToolSyntax.MINIMAX_XML: CallFrame("<minimax:tool_call>", "\n", "\n", "</minimax:tool_call>"),
    ToolSyntax.MUSE_XML: CallFrame("<atem:function_calls>", "\n", "\n", "</atem:function_calls>"),
    ToolSyntax.MISTRAL: CallFrame("[TOOL_CALLS]", "", "", "", is_control=True),
    ToolSyntax.MISTRAL_JSON: CallFrame("[TOOL_CALLS]", "[", "]", "", is_control=True),
    ToolSyntax.PHI_JSON: CallFrame("<|tool_call|>", "[", "]", "<|/tool_call|>", is_control=True),
    ToolSyntax.GRANITE_JSON: CallFrame("<|tool_call|>", "[", "]", "", is_control=True),
    ToolSyntax.COHERE_JSON: CallFrame("<|START_ACTION|>", "[\n    ", "\n]", "<|END_ACTION|>", is_control=True),
    ToolSyntax.HUNYUAN_JSON: CallFrame("<tool_calls>", "[", "]", "</tool_calls>"),
    ToolSyntax.NEMOTRON_JSON: CallFrame("<TOOLCALL>", "[", "]", "</TOOLCALL>"),
    ToolSyntax.GIGACHAT_JSON: CallFrame("<|function_call|>", "", "", "", is_control=True),
    ToolSyntax.DEEPSEEK: CallFrame(
        *("<｜tool▁call▁begin｜>", "", "", "<｜tool▁call▁end｜>"),
        is_control=True,
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolSyntax.DEEPSEEK_BLOCK: CallFrame(
        *("<｜tool▁call▁begin｜>", "", "\n```", "<｜tool▁call▁end｜>"),
        is_control=True,
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    ToolSyntax.DSML: CallFrame("<｜DSML｜function_calls>", "\n", "\n", "</｜DSML｜function_calls>"),
    ToolSyntax.DSML_CALLS: CallFrame("<｜DSML｜tool_calls>", "\n", "\n", "</｜DSML｜tool_calls>"),
    ToolSyntax.KIMI: CallFrame(
        *("<|tool_call_begin|>", "", "", "<|tool_call_end|>"),
        is_control=True,
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    ToolSyntax.SOLAR: CallFrame(
        *("<|tool_call:begin|>", "", "", "<|tool_call:end|>"),
        is_control=True,
        section=("<|tool_calls|>", "<|calls|>"),
    ),
    ToolSyntax.LFM2: CallFrame("<|tool_call_start|>", "[", "]", "<|tool_call_end|>", is_control=True),
    ToolSyntax.OLMO: CallFrame("<function_calls>", "", "", "</function_calls>"),
    ToolSyntax.GEMMA: CallFrame("<|tool_call>", "", "", "<tool_call|>", is_control=True),
}

CALL_KEYS: Final[Mapping[ToolSyntax, tuple[str, str]]] = {
    ToolSyntax.LLAMA_JSON: ("name", "parameters"),
    ToolSyntax.COHERE_JSON: ("tool_name", "parameters"),
}
"""The keys of a JSON call's name and arguments, where they are not the usual ones."""
