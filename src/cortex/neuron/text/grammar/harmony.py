"""The messages of a harmony response as grammar rules (`output/harmony.py` reads them).

The prompt ends with `<|start|>assistant`. Reasoning and text that announces a call may come first, each as a message of
its own; the last message is the answer, or a call. The model ends it with a control token.
"""

from __future__ import annotations

from collections.abc import Sequence

from cortex.neuron.text.grammar.lark import LarkGrammar, literal
from cortex.neuron.text.output.harmony import CHANNEL, CONSTRAIN, END, FUNCTIONS, MARKERS, MESSAGE, START
from cortex.wire.requests import Tool


class HarmonyRules:
    """Adds rules to one grammar."""

    def __init__(self, grammar: LarkGrammar) -> None:
        self._grammar = grammar

    def before(self, *, reasons: bool, speaks: bool) -> str:
        """The messages before the last one. `reasons`, `speaks`: whether the model may reason, and write text."""
        channels = [*(["analysis"] if reasons else []), *(["commentary"] if speaks else [])]
        if not channels:
            return ""
        message = self._message(f"({' | '.join(map(literal, channels))})", self._text())
        following = f"{self._grammar.marker(END)} {self._grammar.marker(START)} {literal('assistant')}"
        return f"{self._grammar.rule('earlier', f'{message} {following}')}* "

    def final(self, body: str) -> str:
        """The answer, whose text is `body`."""
        return self._grammar.rule("final", self._message(literal("final"), body))

    def any_final(self) -> str:
        return self.final(self._text())

    def calls(self, tools: Sequence[Tool], *, with_schemas: bool = True) -> str:
        """A call of one of `tools`: its recipient in the channel, or in the role. Without schemas, the arguments are
        any object."""
        grammar = self._grammar
        kind = f"({literal(' ')} {grammar.marker(CONSTRAIN)} {literal('json')} | {literal(' json')})?"
        calls = []
        for tool in tools:
            recipient = literal(f" to={FUNCTIONS}{tool.name}")
            commentary = f"{grammar.marker(CHANNEL)} {literal('commentary')}"
            header = f"({commentary} {recipient} | {recipient} {commentary})"
            schema = tool.parameters if with_schemas else {}
            arguments = grammar.json({"type": "object", **schema}, lenient=True)
            calls.append(grammar.rule("tool", f"{header} {kind} {grammar.marker(MESSAGE)} {arguments}"))
        return grammar.rule("call", " | ".join(calls))

    def _message(self, channel: str, body: str) -> str:
        return f"{self._grammar.marker(CHANNEL)} {channel} {self._grammar.marker(MESSAGE)} {body}"

    def _text(self) -> str:
        return self._grammar.text_without(*MARKERS)
