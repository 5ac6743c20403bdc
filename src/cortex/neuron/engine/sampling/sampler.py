"""Draws the next tokens on the device.

Each row's parameters stay in device memory from the step that admits it; a step only names the rows that draw.
Options that no row of a batch uses cost nothing: an all-greedy batch is one argmax.
Order of operations: grammar mask, allowed tokens, bans and bias; penalties; temperature; top-k, top-p, min-p; draw.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.engine.sampling.penalties import Penalties, is_penalised
from cortex.neuron.kernels.greedy import argmax, argmax_reference
from cortex.neuron.kernels.gumbel import gumbel_noise

MIN_TEMPERATURE = 1e-5
"""Lower temperatures draw the same tokens, but dividing the logits by them would overflow."""


class Draw(NamedTuple):
    """One row that draws in a step. A named tuple: one is made for every token."""

    row: int
    num_drawn: int
    """Tokens drawn for it before this one."""
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


class Sampler:
    """Owns the sampling state of every row. Belongs to the engine thread."""

    def __init__(
        self, max_rows: int, vocab: int, context_tokens: int, device: torch.device, *, is_batch_invariant: bool = False
    ) -> None:
        """`is_batch_invariant`: the draw of a row must not depend on how many rows draw with it."""
        self._is_batch_invariant = is_batch_invariant
        self.device = device
        self.vocab = vocab
        self._params: list[SamplingParams] = [SamplingParams()] * max_rows
        self._requests: list[EngineRequest | None] = [None] * max_rows
        self._is_plain = [_is_argmax(SamplingParams())] * max_rows
        """Whether each row draws the argmax once its request has its `min_tokens`."""
        self._temperature = torch.ones(max_rows, device=device)
        self._top_k = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._top_p = torch.ones(max_rows, device=device)
        self._min_p = torch.zeros(max_rows, device=device)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._allowed: dict[int, Tensor] = {}
        """[vocab] bool, for rows that may draw only some tokens."""
        self._penalties = Penalties(max_rows, vocab, context_tokens, device)

    def assign(self, row: int, request: EngineRequest, drawn: Sequence[int] = ()) -> None:
        """Gives a row to a request, before the first step that computes it. `drawn`: tokens drawn in an earlier row."""
        params = request.sampling
        self._requests[row] = request
        self._params[row] = params
        self._is_plain[row] = _is_argmax(params)
        self._allowed.pop(row, None)
        if params.allowed_token_ids:
            known = [token for token in params.allowed_token_ids if 0 <= token < self.vocab]
            self._allowed[row] = torch.zeros(self.vocab, dtype=torch.bool, device=self.device)
            self._allowed[row][torch.tensor(known, device=self.device)] = True
        if params.temperature > 0:
            seed = params.seed if params.seed is not None else secrets.randbits(62)
            self._temperature[row] = max(params.temperature, MIN_TEMPERATURE)
            self._top_k[row] = min(params.top_k, self.vocab) if params.top_k > 0 else self.vocab
            self._top_p[row] = params.top_p
            self._min_p[row] = params.min_p
            self._seeds[row] = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        self._penalties.assign(row, params, request.prompt, drawn)

    def is_plain(self, draws: Sequence[Draw]) -> bool:
        """Whether all of these draws are a plain argmax."""
        for draw in draws:
            if not self._is_plain[draw.row]:
                return False
            request = self._requests[draw.row]
            if request is not None and draw.num_drawn < request.min_tokens:
                return False
        return True

    def draw(
        self, logits: Tensor, rows: Tensor, positions: Tensor, draws: Sequence[Draw], mask: Tensor | None = None
    ) -> Drawn:
        """logits: [draws, vocab]; rows and positions: [draws] int64; mask: [draws, vocab] bool, False is forbidden."""
        if mask is None and self.is_plain(draws):
            return Drawn(*argmax(logits))
        params = [self._params[draw.row] for draw in draws]
        healthy = logits.amax(-1).isfinite()
        raw = logits
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        if any(param.allowed_token_ids for param in params):
            everything = torch.ones(self.vocab, dtype=torch.bool, device=self.device)
            allowed = torch.stack([self._allowed.get(draw.row, everything) for draw in draws])
            logits = logits.masked_fill(~allowed, -torch.inf)
        logits = self._biased(logits, draws)
        drafted = [draw.drafted for draw in draws]
        logits = self._penalties.apply(logits, rows, positions, params, drafted)
        greedy = [param.temperature <= 0 for param in params]
        if all(greedy):
            tokens = _argmax(logits)
        else:
            tokens = self._sampled(logits.float(), rows, positions, params)
            if any(greedy):
                tokens = torch.where(torch.tensor(greedy, device=self.device), _argmax(logits), tokens)
        self._penalties.count(rows, positions, tokens, params, drafted)
        return self._with_logprobs(Drawn(tokens, healthy), raw, params)

    def _biased(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Adds the requests' biases, and bans stop tokens while a request is below its `min_tokens`."""
        index: list[tuple[int, int, float]] = []
        for number, draw in enumerate(draws):
            request = self._requests[draw.row]
            if request is None:
                continue
            index += [(number, token, bias) for token, bias in request.sampling.logit_bias if 0 <= token < self.vocab]
            if draw.num_drawn < request.min_tokens:
                index += [(number, token, -torch.inf) for token in request.stop_token_ids if 0 <= token < self.vocab]
        if not index:
            return logits
        row_ids, tokens, biases = zip(*index, strict=True)
        where = (torch.tensor(row_ids, device=self.device), torch.tensor(tokens, device=self.device))
        return logits.float().index_put(where, torch.tensor(biases, device=self.device), accumulate=True)

    def _sampled(self, logits: Tensor, rows: Tensor, positions: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        logits = logits / self._temperature[rows, None]
        if any(param.top_k > 0 or param.top_p < 1 for param in params):
            # The library sums the probabilities of one row in another order than those of several.
            parts = zip(*(x.split(1 if self._is_batch_invariant else len(rows)) for x in (logits, rows)), strict=True)
            kept = [_keep_top(part, self._top_k[own], self._top_p[own]) for part, own in parts]
            logits = kept[0] if len(kept) == 1 else torch.cat(kept)
        if any(param.min_p > 0 for param in params):
            floor = logits.amax(-1, keepdim=True) + self._min_p[rows, None].log()
            logits = logits.masked_fill(logits < floor, -torch.inf)
        return _argmax(logits + gumbel_noise(self._seeds[rows], positions, self.vocab))

    def _with_logprobs(self, drawn: Drawn, raw: Tensor, params: Sequence[SamplingParams]) -> Drawn:
        """Adds log-probabilities of the model's own logits, before the request's options changed them."""
        wanted = [param.top_logprobs for param in params if param.top_logprobs is not None]
        if not wanted:
            return drawn
        logprobs = raw.float().log_softmax(-1)
        chosen = logprobs.gather(1, drawn.tokens[:, None])[:, 0]
        if max(wanted) == 0:
            return Drawn(drawn.tokens, drawn.healthy, chosen)
        top = logprobs.topk(min(max(wanted), self.vocab), dim=-1)
        return Drawn(drawn.tokens, drawn.healthy, chosen, top.indices, top.values)


def _is_argmax(params: SamplingParams) -> bool:
    changes_logits = bool(params.logit_bias or params.allowed_token_ids) or is_penalised(params)
    return params.temperature <= 0 and params.top_logprobs is None and not changes_logits


def _argmax(logits: Tensor) -> Tensor:
    """[rows] int64: the argmax of each row."""
    return logits.argmax(-1) if logits.is_cuda else argmax_reference(logits)[0]


def _keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the `top_k` largest, and of those the fewest that together reach `top_p`; always keeps the first."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    drop = (before >= top_p[:, None]) & (rank > 0)
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(drop, -torch.inf))
