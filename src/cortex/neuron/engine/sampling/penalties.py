"""Penalties on repeated tokens, counted on the device so that a step needs nothing from the host.

Presence and frequency apply to drawn tokens; repetition applies to prompt and output, or to the last `window` of them.
Memory is allocated when the first request asks for a penalty; a load leaves room for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cortex.neuron.engine.request import SamplingParams


def is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class Penalties:
    """Per row: how often each token was drawn, and all tokens in order."""

    def __init__(self, max_rows: int, vocab: int, context_tokens: int, device: torch.device) -> None:
        self._shape = (max_rows, vocab)
        self._context_tokens = context_tokens
        self._device = device
        self._counts: Tensor | None = None  # [rows, vocab] int32, drawn tokens
        self._history: Tensor | None = None  # [rows, context] int32, prompt and drawn tokens by position

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self._counts, self._history) if part is not None)

    def assign(self, row: int, params: SamplingParams, prompt: Sequence[int], drawn: Sequence[int]) -> None:
        """Starts a row with its tokens so far. Rows of requests without penalties are not updated."""
        if not is_penalised(params):
            return
        if self._counts is None or self._history is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._history = torch.zeros(self._shape[0], self._context_tokens, dtype=torch.int32, device=self._device)
        self._counts[row] = torch.tensor(drawn, dtype=torch.int64).bincount(minlength=self._shape[1])
        past = torch.tensor((*prompt, *drawn), dtype=torch.int64)
        self._history[row, : len(past)] = past

    def apply(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        params: Sequence[SamplingParams],
        drafted: Sequence[int | None],
    ) -> Tensor:
        """`positions`: those of each draw's latest token. Penalties apply to the history up to and including it.
        `drafted`: the draft token after it, with which the next draw of the same row continues; None: it has none."""
        if self._counts is None or self._history is None or not any(map(is_penalised, params)):
            return logits
        logits = logits.float()
        counts = self._counts[rows]
        if earlier := _drafted_before(drafted):
            draws, tokens = torch.tensor(earlier, device=self._device).unbind(1)
            counts.index_put_((draws, tokens), torch.ones_like(tokens, dtype=counts.dtype), accumulate=True)
            checking = torch.tensor([i for i, token in enumerate(drafted) if token is not None], device=self._device)
            known = torch.tensor([token for token in drafted if token is not None], device=self._device)
            self._history.index_put_((rows[checking], positions[checking] + 1), known.int())
        presence = torch.tensor([param.presence_penalty for param in params], device=self._device)
        frequency = torch.tensor([param.frequency_penalty for param in params], device=self._device)
        logits = logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)
        if any(param.repetition_penalty != 1.0 for param in params):
            logits = self._without_repetition(logits, self._history[rows], positions, params)
        return logits

    def _without_repetition(
        self, logits: Tensor, history: Tensor, positions: Tensor, params: Sequence[SamplingParams]
    ) -> Tensor:
        most = self._context_tokens
        windows = torch.tensor([min(param.repetition_window or most, most) for param in params])
        position = torch.arange(self._context_tokens, device=self._device)
        recent = (position <= positions[:, None]) & (position > positions[:, None] - windows.to(self._device)[:, None])
        seen = torch.zeros_like(logits).scatter_reduce_(1, history.long(), recent.to(logits.dtype), "amax") > 0
        penalty = torch.tensor([param.repetition_penalty for param in params], device=self._device)[:, None]
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def count(
        self,
        rows: Tensor,
        positions: Tensor,
        tokens: Tensor,
        params: Sequence[SamplingParams],
        drafted: Sequence[int | None],
    ) -> None:
        """Records the tokens drawn after `positions`, without those after a wrong draft token. The history may have
        them: it is read up to the latest token only."""
        if self._counts is None or self._history is None or not any(map(is_penalised, params)):
            return
        ones = _accepted(tokens, drafted).int()
        self._counts.index_put_((rows, tokens), ones, accumulate=True)
        self._history.index_put_((rows, (positions + 1).clamp(max=self._context_tokens - 1)), tokens.int())


def _drafted_before(drafted: Sequence[int | None]) -> list[tuple[int, int]]:
    """(draw, token) for each draft token before each draw."""
    pairs: list[tuple[int, int]] = []
    before: list[int] = []
    for draw, token in enumerate(drafted):
        pairs += [(draw, one) for one in before]
        before = [*before, token] if token is not None else []
    return pairs


def _accepted(tokens: Tensor, drafted: Sequence[int | None]) -> Tensor:
    """[draws] bool: whether all draft tokens of the row before each draw were drawn."""
    if all(token is None for token in drafted):
        return torch.ones_like(tokens, dtype=torch.bool)
    firsts = [0]  # for each draw: the first one of the same row
    for draw, token in enumerate(drafted[:-1], start=1):
        firsts.append(draw if token is None else firsts[-1])
    wanted = torch.tensor([-1 if token is None else token for token in drafted], device=tokens.device)
    is_wrong = (tokens != wanted).int()
    num_wrong_before = is_wrong.cumsum(0) - is_wrong
    return num_wrong_before == num_wrong_before[torch.tensor(firsts, device=tokens.device)]
