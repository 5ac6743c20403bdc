"""Draws the next tokens on the device.

Each row's options are in device memory from the step that admits it; a step only names the rows that draw.
Options that no row of a batch uses cost nothing: an all-greedy batch is one argmax.
Order of operations: grammar mask, allowed tokens, bans and bias; penalties; temperature; top-k, top-p, min-p; draw.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.engine.uploads import fill
from cortex.neuron.kernels.greedy import argmax
from cortex.neuron.kernels.jit import has_kernels
from cortex.neuron.kernels.sampling import rows as options
from cortex.neuron.kernels.sampling.draw import DrawnTokens, draw_tokens
from cortex.neuron.kernels.sampling.logprobs import top_logprobs
from cortex.neuron.kernels.sampling.reference import count_reference, draw_reference, top_logprobs_reference
from cortex.neuron.kernels.sampling.rows import ADJUSTING, FOREVER, Draws, RowOptions, RowTables, number, word_mask
from cortex.neuron.kernels.sampling.tally import count_drawn

MIN_TEMPERATURE = 1e-5
"""Lower temperatures draw the same tokens, but dividing by them would overflow."""
_EDITS = 512
"""The capacity for edits per row grows in multiples of this."""
_BANNING = 1 << 16
"""A flag for the host only: edits end with the request's `min_tokens`."""

(_SAMPLED, _CUT, _MIN_P, _EDITED, _RESTRICTED, _PENALISED, _LOGPROBS, _TOP_LOGPROBS) = (
    number(flag)
    for flag in (
        options.SAMPLED,
        options.CUT,
        options.MIN_P,
        options.EDITED,
        options.RESTRICTED,
        options.PENALISED,
        options.LOGPROBS,
        options.TOP_LOGPROBS,
    )
)


KINDS = (_SAMPLED, _SAMPLED | _CUT | _MIN_P, _SAMPLED | _CUT | _MIN_P | ADJUSTING)
"""The flags of rows that sample from all tokens, from some, and after changes of their logits. There is a graph for
each; a batch takes the first that has the kernels it needs."""


class Draw(NamedTuple):
    """One row that draws in a step. A named tuple: one is made for every token."""

    row: int
    num_drawn: int
    """Number of tokens drawn for it before."""
    drafted: int | None = None
    """The draft token that this draw checks; the next draw is of the same row and after that token."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Device tensors, one entry per drawing row."""

    tokens: Tensor
    healthy: Tensor
    """False if the logits of a row are not finite."""
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


class GrammarMask(NamedTuple):
    """The tokens that draws under a grammar may draw."""

    words: Tensor
    """[constrained draws, words] int32 on the device: a bit for each token."""
    rows: NDArray[np.int64]
    """For each draw its row of `words`; -1 without a grammar."""


def draw_lines(
    index: NDArray[np.int64], positions: NDArray[np.int64], draws: Sequence[Draw], mask: GrammarMask | None
) -> NDArray[np.int64]:
    """The draws of a step as the device reads them: see `Draws`. `index`: the row of the logits of each."""
    count = len(draws)
    firsts, drafted = np.arange(count), np.full(count, -1)
    if any(draw[2] is not None for draw in draws):
        drafted = np.array([-1 if draw[2] is None else draw[2] for draw in draws])
        firsts[1:][drafted[:-1] >= 0] = 0
        firsts = np.maximum.accumulate(firsts)
    lines = np.empty((count, number(options.COLUMNS)), np.int64)
    rows = [draw[0] for draw in draws]
    for column, values in enumerate((index, rows, positions, firsts, drafted, -1 if mask is None else mask.rows)):
        lines[:, column] = values
    return lines


class Sampler:
    """Owns the sampling state of every row. Belongs to the engine thread."""

    def __init__(self, max_rows: int, vocab: int, context_tokens: int, device: torch.device) -> None:
        self.device = device
        self.vocab = vocab
        self._max_rows = max_rows
        self._requests: list[EngineRequest | None] = [None] * max_rows
        self._flags = np.zeros(max_rows, np.int64)
        self._num_top = np.zeros(max_rows, np.int64)

        def unused(*shape: int) -> Tensor:
            return torch.zeros((1, *shape), dtype=torch.int32, device=device)

        table = torch.zeros((max_rows, number(options.WIDTH)), dtype=torch.int64, device=device)
        words = -(-vocab // 32)
        # A table of one row is there for the kernels' arguments: no row uses it yet. Replaced when one has to grow.
        self.tables = RowTables(table, unused(3, _EDITS), unused(words), unused(vocab), unused(context_tokens), vocab)
        self.no_mask = torch.zeros((1, words), dtype=torch.int32, device=device)

    @property
    def penalty_bytes(self) -> int:
        """Memory for penalties: allocated when the first request asks for one; a load leaves room for it."""
        return sum(table.nbytes for table in (self.tables.tally, self.tables.history) if len(table) > 1)

    # -- requests --------------------------------------------------------------------------------------------------

    def assign(self, row: int, request: EngineRequest, drawn: Sequence[int] = ()) -> None:
        """Gives a row to a request, before the first step that computes it. `drawn`: tokens drawn in an earlier row."""
        params = request.sampling
        self._requests[row] = request
        edits, is_banning = self._edits(request)
        flags = _flags(params, self.vocab) | (_EDITED if edits else 0)
        num_top = params.top_logprobs or 0
        self._flags[row], self._num_top[row] = flags | (_BANNING if is_banning else 0), min(num_top, self.vocab)
        if edits:
            self._set_edits(row, edits)
        if flags & _RESTRICTED:
            known = [token for token in params.allowed_token_ids if 0 <= token < self.vocab]
            if len(self.tables.allowed) == 1:
                allowed = self.tables.allowed.new_zeros(self._max_rows, self.tables.num_words)
                self.tables = replace(self.tables, allowed=allowed)
            fill(self.tables.allowed[row], word_mask(known, self.vocab))
        if flags & _PENALISED:
            self._set_tally(row, request, drawn)
        line = RowOptions(
            flags=flags,
            temperature=max(params.temperature, MIN_TEMPERATURE),
            top_p=params.top_p,
            log_min_p=math.log(params.min_p) if params.min_p > 0 else -math.inf,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            top_k=min(params.top_k, self.vocab) if params.top_k > 0 else self.vocab,
            seed=_signed(params.seed if params.seed is not None else secrets.randbits(62)),
            window=self._window(params),
            num_edits=len(edits),
        ).line()
        fill(self.tables.options[row], line)

    def _window(self, params: SamplingParams) -> int:
        """0: the repetition penalty applies to all tokens."""
        context_tokens = self.tables.history.shape[-1]
        is_bounded = params.repetition_penalty != 1.0 and 0 < params.repetition_window < context_tokens
        return params.repetition_window if is_bounded else 0

    def _edits(self, request: EngineRequest) -> tuple[list[tuple[int, float, int]], bool]:
        """Additions to logits by token, with the position where they end: biases, and bans of stop tokens until
        `min_tokens`. Also returns whether there are bans."""
        edits = [(token, bias, FOREVER) for token, bias in request.sampling.logit_bias if 0 <= token < self.vocab]
        until = len(request.prompt) + request.min_tokens - 1
        bans = [(token, -math.inf, until) for token in request.stop_token_ids if 0 <= token < self.vocab]
        return sorted(edits + (bans if request.min_tokens else [])), bool(request.min_tokens and not edits)

    def _set_edits(self, row: int, edits: list[tuple[int, float, int]]) -> None:
        own = self.tables.edits
        if len(own) == 1 or own.shape[-1] < len(edits):
            capacity = max(own.shape[-1], -(-len(edits) // _EDITS) * _EDITS)
            grown = own.new_zeros(self._max_rows, 3, capacity)
            grown[: len(own), :, : own.shape[-1]] = own
            self.tables = replace(self.tables, edits=grown)
        tokens, values, until = zip(*edits, strict=True)
        packed = np.stack(
            (np.array(tokens, np.int32), np.array(values, np.float32).view(np.int32), np.array(until, np.int32))
        )
        fill(self.tables.edits[row, :, : len(edits)], packed)

    def _set_tally(self, row: int, request: EngineRequest, drawn: Sequence[int]) -> None:
        """Starts a row with its tokens so far."""
        tables, params = self.tables, request.sampling
        if len(tables.tally) == 1:
            tally, history = (
                table.new_zeros(self._max_rows, table.shape[-1]) for table in (tables.tally, tables.history)
            )
            self.tables = tables = replace(tables, tally=tally, history=history)
        past = np.concatenate((np.asarray(request.prompt, np.int64), np.asarray(drawn, np.int64)))
        window = self._window(params)
        counts = np.bincount(past[len(request.prompt) :], minlength=self.vocab)
        seen = np.bincount(past[-window:] if window else past, minlength=self.vocab)
        most = number(options.MOST)
        seen = np.minimum(seen, most if window else 1)
        packed = (np.minimum(counts, most) + (seen << 16)).astype(np.uint32).view(np.int32)
        fill(tables.tally[row], packed)
        if window:
            fill(tables.history[row, : len(past)], past.astype(np.int32))

    # -- steps -----------------------------------------------------------------------------------------------------

    def is_plain(self, draws: Sequence[Draw]) -> bool:
        """Whether all of these draws are a plain argmax."""
        flags = self._flags[np.fromiter([draw[0] for draw in draws], np.int64, len(draws))]
        if not flags.any():
            return True
        if (flags & ~(_EDITED | _BANNING)).any() or not (flags[flags > 0] & _BANNING).all():
            return False
        requests = ((self._requests[draw.row], draw.num_drawn) for draw in draws)
        return not any(request is not None and num_drawn < request.min_tokens for request, num_drawn in requests)

    def kind(self, rows: NDArray[np.int64]) -> int:
        """The one of KINDS that these rows need."""
        flags = int(np.bitwise_or.reduce(self._flags[rows]))
        return KINDS[2 if flags & ADJUSTING else 1 if flags & (_CUT | _MIN_P) else 0]

    def draw(self, logits: Tensor, draws: Draws, rows: NDArray[np.int64]) -> Drawn:
        """logits: [any, vocab]; `draws` names the row of each draw. `rows`: those of `draws`, on the host."""
        flags = int(np.bitwise_or.reduce(self._flags[rows]))
        if flags == 0 and not draws.is_masked:
            return Drawn(*argmax(logits.index_select(0, draws.index)))
        if not has_kernels(logits):
            return self._drawn_by_reference(logits, draws, rows, flags)
        return self.with_logprobs(self.compute(logits, draws, flags), logits, draws, rows)

    def compute(self, logits: Tensor, draws: Draws, flags: int) -> DrawnTokens:
        """Draws on a GPU, with the kernels that rows with these flags need."""
        drawn = draw_tokens(logits, draws, self.tables, flags)
        if flags & _PENALISED:
            count_drawn(drawn.tokens, draws, self.tables)
        return drawn

    def with_logprobs(self, drawn: DrawnTokens, logits: Tensor, draws: Draws, rows: NDArray[np.int64]) -> Drawn:
        """Adds what some rows ask for."""
        flags = int(np.bitwise_or.reduce(self._flags[rows]))
        if not flags & _LOGPROBS:
            return Drawn(drawn.tokens, drawn.healthy)
        if not flags & _TOP_LOGPROBS:
            return Drawn(drawn.tokens, drawn.healthy, drawn.logprobs)
        num_top = int(self._num_top[rows].max())
        top = top_logprobs(logits, draws, self.tables, drawn.normaliser, num_top)
        return Drawn(drawn.tokens, drawn.healthy, drawn.logprobs, *top)

    def compute_all_kinds(self, logits: Tensor) -> None:
        """Draws in every kind, for the pass that collects kernels, when no row is assigned."""
        lines = torch.zeros((len(logits), number(options.COLUMNS)), dtype=torch.int64, device=logits.device)
        draws = Draws(lines, self.no_mask)
        for flags in KINDS:
            drawn = self.compute(logits, draws, flags)
        top_logprobs(logits, draws, self.tables, drawn.normaliser, 5)

    def _drawn_by_reference(self, logits: Tensor, draws: Draws, rows: NDArray[np.int64], flags: int) -> Drawn:
        tokens, healthy = draw_reference(logits, draws, self.tables)
        if flags & _PENALISED:
            count_reference(tokens, draws, self.tables)
        if not flags & _LOGPROBS:
            return Drawn(tokens, healthy)
        num_top = int(self._num_top[rows].max())
        chosen, top_ids, top_values = top_logprobs_reference(logits, draws, tokens, num_top)
        return Drawn(tokens, healthy, chosen, top_ids, top_values) if num_top else Drawn(tokens, healthy, chosen)


def _flags(params: SamplingParams, vocab: int) -> int:
    """The flags without that of edits."""
    is_penalised = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    is_sampled = params.temperature > 0
    wanted = {
        _SAMPLED: is_sampled,
        _CUT: is_sampled and (0 < params.top_k < vocab or np.float32(params.top_p) < 1),
        _MIN_P: is_sampled and params.min_p > 0,
        _RESTRICTED: bool(params.allowed_token_ids),
        _PENALISED: is_penalised,
        _LOGPROBS: params.top_logprobs is not None,
        _TOP_LOGPROBS: bool(params.top_logprobs),
    }
    return sum(flag for flag, is_set in wanted.items() if is_set)


def _signed(seed: int) -> int:
    """The 64 bits of `seed` as a signed integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
