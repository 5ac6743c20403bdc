"""Output that must conform to a grammar: the tokens that may be drawn next, as a mask on the device.

The host matches the output against the grammar token by token, so a step that draws for a constrained sequence is
planned only after the host has read that sequence's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.sampling.sampler import GrammarMask
from cortex.neuron.text.errors import GrammarRejected, GrammarUnspellable, TextModelError
from cortex.neuron.text.grammar.matcher import Matcher, MatchState


class Constraint:
    """The state of one sequence in its grammar."""

    def __init__(self, state: MatchState, allowed: Tensor | None = None) -> None:
        """`allowed`: the only tokens that the request allows, as bits. [words] int32, on the host"""
        self.state = state
        self._allowed = allowed
        self.failure: str | None = None
        """Why the grammar cannot be matched any further; ignore tokens drawn after that."""
        self.is_contradiction = False
        """Whether it failed because the request contradicts itself, or asks for what the model cannot spell."""

    def fill_mask(self, row: Tensor) -> None:
        """Sets the bits of the allowed next tokens. row: [words] int32, on the host"""
        try:
            self.state.fill_mask(row)
        except Exception as error:  # noqa: BLE001 - any error of the grammar library concerns this sequence alone
            self._fail(error)
        else:
            self.check_allowed(row)

    @staticmethod
    def fill_all(constraints: Sequence[Constraint], rows: Tensor) -> None:
        """As `fill_mask`, of several sequences at once. rows: [constraints, words]"""
        try:
            MatchState.fill_masks([constraint.state for constraint in constraints], rows)
            for constraint, row in zip(constraints, rows, strict=True):
                constraint.state.check()
                constraint.check_allowed(row)
        except Exception:  # noqa: BLE001 - which of them is at fault shows one by one
            for constraint, row in zip(constraints, rows.fill_(-1), strict=True):
                constraint.fill_mask(row)

    def forced_tokens(self) -> tuple[int, ...]:
        """Tokens that the grammar asks for next. Others that spell the same text may be allowed too."""
        try:
            return self.state.forced_tokens()
        except Exception:  # noqa: BLE001 - a draft is not needed
            return ()

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` the grammar allows one after the other, without one that ends the output."""
        ahead = Constraint(self.state.copy(), self._allowed) if tokens else self
        return next((count for count, token in enumerate(tokens) if ahead.is_complete_after(token)), len(tokens))

    def fill_masks(self, rows: Tensor, drafted: Sequence[int]) -> None:
        """As `fill_mask`, for the next token and after each of `drafted`, which `num_allowed` has counted.
        rows: [1 + drafted, words]"""
        self.fill_mask(rows[0])
        ahead = Constraint(self.state.copy(), self._allowed) if drafted else self
        for index, token in enumerate(drafted, start=1):
            if not ahead.is_complete_after(token):
                ahead.fill_mask(rows[index])
        # If that failed, the output fails in the same way once it gets there.

    def is_complete_after(self, token: int) -> bool:
        """Accepts `token`; true if no token may follow it."""
        if self.failure is not None:
            return True  # drawn without a mask
        if self._allowed is not None and not self._allowed[token // 32] >> token % 32 & 1:
            self._contradict()  # drawn with drafts, after which nothing was allowed
            return True
        try:
            self.state.accept(token)
            return self.state.is_finished
        except Exception as error:  # noqa: BLE001 - as above
            if self._allowed is not None and isinstance(error, GrammarRejected):
                self._contradict()
            else:
                self._fail(error)
            return True

    def check_allowed(self, row: Tensor) -> None:
        """Fails if the request allows none of the tokens that the grammar does. row: [words] int32"""
        if self._allowed is not None and not (row & self._allowed).any():
            self._contradict()

    def _contradict(self) -> None:
        self.is_contradiction = True
        self.failure = (
            "none of allowed_token_ids is a token that the format of the output may have next; allow the tokens that "
            "it needs, or leave one of the two out"
        )

    def _fail(self, error: Exception) -> None:
        if isinstance(error, GrammarRejected):
            self.failure = str(error)
            self.is_contradiction = isinstance(error, GrammarUnspellable)
        else:
            self.failure = f"the grammar could not be followed ({type(error).__name__}); simplify it and try again"


class Constraints:
    """Compiles the grammars of one model's requests. Belongs to the engine thread, except `compile`, which any thread
    may call: once a grammar is compiled, compiling it again for the same tenant takes almost nothing."""

    def __init__(self, source: Path, vocab: int, device: torch.device) -> None:
        self._matcher = Matcher(source, vocab)
        self._vocab = vocab
        self._device = device
        self._is_gpu = device.type == "cuda"

    def compile(self, grammar: str, tenant: bytes = b"", allowed_token_ids: Sequence[int] = ()) -> Constraint:
        """Raises RequestError for a grammar that does not compile, and for one that begins with none of the allowed
        tokens; empty: all are. The first one reads the model's vocabulary."""
        try:
            state = self._matcher.compile(grammar, tenant)
        except TextModelError as error:
            raise RequestError(str(error)) from error
        if not allowed_token_ids:
            return Constraint(state)
        constraint = Constraint(state, self._bits(allowed_token_ids))
        constraint.fill_mask(torch.empty(self._matcher.mask_words, dtype=torch.int32))
        if constraint.failure is not None:
            raise RequestError(constraint.failure)
        return constraint

    def _bits(self, tokens: Sequence[int]) -> Tensor:
        """[words] int32"""
        flags = np.zeros(32 * self._matcher.mask_words, dtype=bool)
        flags[[token for token in tokens if 0 <= token < self._vocab]] = True
        return torch.from_numpy(np.packbits(flags, bitorder="little").view(np.int32))

    def mask(self, drawing: Sequence[tuple[Constraint | None, Sequence[int]]]) -> GrammarMask | None:
        """The tokens that each draw may draw; None if no row has a constraint. `drawing`: the constraint of each row,
        and the draft tokens that it checks."""
        counts = [0 if constraint is None else 1 + len(drafted) for constraint, drafted in drawing]
        if not any(counts):
            return None
        words = torch.full((sum(counts), self._matcher.mask_words), -1, dtype=torch.int32, pin_memory=self._is_gpu)
        rows = np.full(sum(1 + len(drafted) for _, drafted in drawing), -1)
        first = masked = 0
        parts: list[tuple[Constraint, Sequence[int], Tensor]] = []
        for count, (constraint, drafted) in zip(counts, drawing, strict=True):
            if constraint is not None:
                parts.append((constraint, drafted, words[masked : masked + count]))
                rows[first : first + count] = np.arange(masked, masked + count)
                masked += count
            first += 1 + len(drafted)
        if len(parts) == masked > 1:  # none checks drafts
            Constraint.fill_all([constraint for constraint, _, _ in parts], words)
        else:
            for constraint, drafted, own in parts:
                constraint.fill_masks(own, drafted)
        return GrammarMask(words.to(self._device, non_blocking=True), rows)
