"""Compiles a grammar on trial, before a request reaches the engine: a grammar that cannot be followed is the client's
error.

The trial has the model's whole tokens and beyond them only bytes, so it takes a fraction of the real vocabulary's time
and memory and finds the same faults: in the syntax, in the size, and output that could not even begin.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from cortex.neuron.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_TOKEN_BYTES: Final = 1023
"""The longest token that the grammar library accepts, which puts a byte before special ones. A grammar never allows a
longer one."""
_STACK_BYTES: Final = 4 << 20
"""Half the stack of the engine's threads. The library recurses along references without a limit: a grammar that would
overflow the stack there must overflow it here, where it ends a worker that does nothing else."""
_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")


@dataclass(frozen=True, slots=True)
class Verdict:
    problem: str | None
    """Why the grammar cannot be followed."""
    cpu_s: float


@dataclass(frozen=True)
class GrammarTrial:
    """Compiles grammars for one model. The grammar library is imported with the first."""

    tokenizer: Tokenizer

    def verdict(self, grammar: str) -> Verdict:
        """Judges a grammar in the form that `matcher.Matcher` compiles."""
        found: list[Verdict] = []
        previous = threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=lambda: found.append(self._verdict(grammar)), name="grammar-trial")
        try:
            thread.start()
        finally:
            threading.stack_size(previous)
        thread.join()
        return found[0]

    def _verdict(self, grammar: str) -> Verdict:
        import llguidance

        vocabulary = self._vocabulary
        began_s = time.thread_time()
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        problem = _readable(matcher.get_error()) if matcher.is_error() else _first_step_problem(matcher)
        return Verdict(problem, time.thread_time() - began_s)

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        import llguidance

        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_TrialVocabulary(self.tokenizer)), slices=[])


class _TrialVocabulary:
    """The vocabulary for the library: the whole tokens at their ids, and a token per byte after the model's last id."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        size = tokenizer.vocab_size
        spelled = {token.id: token.text.encode() for token in tokenizer.vocabulary.whole_tokens}
        whole = {number: text for number, text in spelled.items() if len(text) <= MAX_TOKEN_BYTES}
        self._first_byte = size
        self.eos_token_id = next(iter(tokenizer.eos_ids), size + 256)
        self.special_token_ids: Sequence[int] = [*whole, size + 256]
        self.tokens: Sequence[bytes] = [
            *(whole.get(token_id, b"") for token_id in range(size)),
            *(bytes([byte]) for byte in range(256)),
            b"<end of the trial>",
        ]

    def __call__(self, text: bytes) -> list[int]:
        return [self._first_byte + byte for byte in text]


def _first_step_problem(matcher: llguidance.LLMatcher) -> str | None:
    matcher.compute_bitmask()
    if not matcher.is_error():
        return None
    reason = _readable(matcher.get_error())
    return "no text satisfies it" if reason.startswith("NoExtension") else f"it is too complex ({reason})"


def _readable(error: str) -> str:
    """The library's reason, without dumps of its state."""
    if error.startswith("panic: "):
        return "it is too large for the grammar library; use fewer rules or alternatives"
    reason = error.partition("<state>")[0].strip()
    return _PLACE.sub(r"line \1, column \2: ", reason)
