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

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.opening, self.closing) if self.closing else (self.opening,)


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
    ToolSyntax.LFM2: CallFrame("<|tool_call_start|>", "[", "]", "<|tool_call_end|>", is_control=True),
    ToolSyntax.OLMO: CallFrame("<function_calls>", "", "", "</function_calls>"),
    ToolSyntax.GEMMA: CallFrame("<|tool_call>", "", "", "<tool_call|>", is_control=True),
}
