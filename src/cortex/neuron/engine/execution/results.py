"""A launched step, and its results once the host reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from cortex.neuron.engine.execution.prompt_scores import PromptScores
from cortex.neuron.engine.request import TokenLogprobs
from cortex.neuron.engine.sampling.sampler import Drawn
from cortex.neuron.engine.scheduling.step_plan import RowPlan
from cortex.neuron.engine.uploads import host_memory_for


class RowResult(NamedTuple):
    """What a step computed for one row. A named tuple: one is made for every row of every step."""

    tokens: tuple[int, ...] = ()
    """The drawn tokens that were accepted."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of each token, if any request of the step asks for them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    healthy: bool = True
    """False if the logits that a token was drawn from are not finite."""
    proposed: tuple[int, ...] = ()
    """Draft tokens after the accepted ones."""


NO_RESULT = RowResult()


class Launched:
    """A step that runs on the device."""

    def __init__(
        self,
        device: torch.device,
        rows: Sequence[RowPlan],
        drawn: Drawn | None,
        scores: Sequence[PromptScores] = (),
        proposed: Tensor | None = None,
    ) -> None:
        """`proposed`: draft tokens of the rows that draw, [rows, tokens]."""
        self._rows = rows
        self._proposed = None if proposed is None else _to_host(proposed)
        self._event: torch.cuda.Event | None = None
        self._scores = [one.map(_to_host) for one in scores]
        self._drawn: list[Tensor | None] = []
        if drawn is not None:
            parts = (drawn.tokens, drawn.healthy, drawn.logprobs, drawn.top_ids, drawn.top_logprobs)
            self._drawn = [part if part is None else _to_host(part) for part in parts]
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        """Returns when the device has computed the step."""
        if self._event is not None:
            self._event.synchronize()

    def read(self) -> list[RowResult]:
        """Waits for the step; returns the result of each row in plan order."""
        self.wait()
        if self._is_plain:
            tokens, healthy = (part.tolist() for part in self._drawn if part is not None)
            return [RowResult((token,), healthy=is_healthy) for token, is_healthy in zip(tokens, healthy, strict=True)]
        drawn, scores = self._read_drawn(), iter(self._scores)
        proposed = iter([] if self._proposed is None else self._proposed.tolist())
        results = []
        for row in self._rows:
            result = _accepted(row, list(islice(drawn, row.outputs.draws))) if row.outputs.draws else NO_RESULT
            if self._proposed is not None and row.outputs.draws:
                result = result._replace(proposed=tuple(next(proposed)))
            if row.outputs.scores is not None:
                result = result._replace(prompt_logprobs=tuple(next(scores).read()))
            results.append(result)
        return results

    @property
    def _is_plain(self) -> bool:
        """Whether every row has drawn one token, and nothing else is read."""
        if self._proposed is not None or self._scores or not self._drawn or self._drawn[2] is not None:
            return False
        return all(row.outputs.draws == 1 for row in self._rows)

    def _read_drawn(self) -> Iterator[RowResult]:
        """One draw after the other."""
        if not self._drawn:
            return
        tokens, healthy, logprobs, top_ids, top_logprobs = (
            None if part is None else part.tolist() for part in self._drawn
        )
        for index, (token, is_healthy) in enumerate(zip(tokens or (), healthy or (), strict=True)):
            entries: tuple[TokenLogprobs, ...] = ()
            if logprobs is not None and top_ids is not None and top_logprobs is not None:
                entries = (TokenLogprobs(logprobs[index], tuple(top_ids[index]), tuple(top_logprobs[index])),)
            elif logprobs is not None:
                entries = (TokenLogprobs(logprobs[index]),)
            yield RowResult((token,), entries, healthy=is_healthy)


def _accepted(row: RowPlan, draws: list[RowResult]) -> RowResult:
    """The draws of a row up to the first whose draft token was wrong."""
    if len(draws) == 1:
        return draws[0]
    tokens = tuple(token for draw in draws for token in draw.tokens)
    count = row.num_accepted(tokens)
    logprobs = tuple(one for draw in draws[:count] for one in draw.logprobs)
    return RowResult(tokens[:count], logprobs, healthy=all(draw.healthy for draw in draws[:count]))


def _to_host(tensor: Tensor) -> Tensor:
    """A copy, also on a CPU: the next replay of a graph overwrites its outputs."""
    return host_memory_for(tensor).copy_(tensor, non_blocking=True)
