"""Tracks whether a model is still reasoning, token by token."""

from __future__ import annotations

from cortex.neuron.text.output.reasoning import ReasoningSplitter
from cortex.neuron.text.tokenizer.detokenizer import Detokenizer


class ReasoningWatch:
    """Tracks one choice from its first token on. Owned by one request."""

    def __init__(self, detokenizer: Detokenizer, splitter: ReasoningSplitter) -> None:
        self._detokenizer = detokenizer
        self._splitter = splitter

    def push(self, token: int) -> None:
        if text := self._detokenizer.push((token,)):
            self._splitter.push(text)

    @property
    def is_thinking(self) -> bool:
        return self._splitter.is_thinking

    @property
    def is_over(self) -> bool:
        """Whether the response has begun, so that no reasoning can follow."""
        return self._splitter.is_over
