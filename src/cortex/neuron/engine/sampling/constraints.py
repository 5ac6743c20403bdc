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
        self.allowed = allowed
        self.accepted: bool | None = None
        """Whether the grammar allowed the token of the next check, if it was matched already."""
        self.failure: str | None = None
        """Why the grammar cannot be matched any further; ignore tokens drawn afterwards."""
        self.is_contradiction = False
        """Whether it failed because the request contradicts itself or asks for text that the model cannot spell."""

    def fill_mask(self, row: Tensor) -> None:
        """Sets the bits of the allowed next tokens. row: [words] int32, on the host"""
        try:
            self.state.fill_mask(row)
        except Exception as error:  # noqa: BLE001 - any error of the grammar library concerns this sequence alone
            self._fail(error)
        else:
            self.check_allowed(row)

    @staticmethod
    def fill_all(bound: Sequence[tuple[Constraint, Sequence[int]]], rows: Tensor) -> None:
        """As `fill_masks`, of several sequences at once. rows: [sequences + drafted, words]"""
        # A draft that fails is no reason for its output to: it may never get there.
        states = [(each.state.copy() if drafted else each.state, drafted) for each, drafted in bound]
        try:
            MatchState.fill_masks(states, rows)
        except Exception:  # noqa: BLE001 - which of them is at fault shows one by one
            Constraint._fill_each(bound, rows)
            return
        index = 0
        for each, drafted in bound:
            if each.allowed is not None:
                each.check_allowed(rows[index])
            index += 1 + len(drafted)

    @staticmethod
    def _fill_each(bound: Sequence[tuple[Constraint, Sequence[int]]], rows: Tensor) -> None:
        index = 0
        for each, drafted in bound:
            each.fill_masks(rows[index : index + 1 + len(drafted)].fill_(-1), drafted)
            index += 1 + len(drafted)

    def forced_tokens(self) -> tuple[int, ...]:
        """Tokens that the grammar forces next. Others that spell the same text may be allowed too."""
        try:
            return self.state.forced_tokens()
        except Exception:  # noqa: BLE001 - a draft is not needed
            return ()

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of `tokens` the grammar allows one after the other, without one that ends the output."""
        ahead = Constraint(self.state.copy(), self.allowed) if tokens else self
        return next((count for count, token in enumerate(tokens) if ahead.is_complete_after(token)), len(tokens))

    def fill_masks(self, rows: Tensor, drafted: Sequence[int]) -> None:
        """As `fill_mask`, for the next token and after each of `drafted`, which `num_allowed` has counted.
        rows: [1 + drafted, words]"""
        self.fill_mask(rows[0])
        ahead = Constraint(self.state.copy(), self.allowed) if drafted else self
        for index, token in enumerate(drafted, start=1):
            if not ahead.is_complete_after(token):
                ahead.fill_mask(rows[index])
        # If that failed, the output fails in the same way once it gets there.

    @staticmethod
    def accept_all(drawn: Sequence[tuple[Constraint, int]]) -> None:
        """Matches a token of each of several sequences at once, before `is_complete_after` is called for them."""
        matched = [(each, token) for each, token in drawn if each.failure is None and each.allowed is None]
        if len(matched) > 1:  # for one, to wake the library's threads takes longer
            accepted = MatchState.accept_all([(each.state, token) for each, token in matched])
            for (each, _), is_accepted in zip(matched, accepted, strict=True):
                each.accepted = is_accepted

    def is_complete_after(self, token: int) -> bool:
        """Accepts `token`; true if no token may follow it."""
        if self.failure is not None:
            return True  # drawn without a mask
        if self.allowed is not None and not self.allowed[token // 32] >> token % 32 & 1:
            self._contradict()  # drawn with drafts, after which nothing was allowed
            return True
        is_accepted, self.accepted = self.accepted, None
        try:
            if is_accepted is None:
                self.state.accept(token)
            else:
                self.state.check_accepted(token, is_accepted)
            return self.state.is_finished
        except Exception as error:  # noqa: BLE001 - as above
            if self.allowed is not None and isinstance(error, GrammarRejected):
                self._contradict()
            else:
                self._fail(error)
            return True

    def check_allowed(self, row: Tensor) -> None:
        """Fails if the request allows none of the tokens that the grammar does. row: [words] int32"""
        if self.allowed is not None and not (row & self.allowed).any():
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
        rows: list[int] = []
        bound: list[tuple[Constraint, Sequence[int]]] = []
        masked = 0
        for constraint, drafted in drawing:
            count = 1 + len(drafted)
            if constraint is None:
                rows += [-1] * count
            else:
                rows += range(masked, masked + count)
                masked += count
                bound.append((constraint, drafted))
        if not bound:
            return None
        words = torch.empty((masked, self._matcher.mask_words), dtype=torch.int32, pin_memory=self._is_gpu)
        if masked > 1:
            Constraint.fill_all(bound, words)
        else:  # without waking the library's threads
            bound[0][0].fill_mask(words[0].fill_(-1))
        return GrammarMask(words.to(self._device, non_blocking=True), np.array(rows))
