"""The draw of a decode step as a graph: one launch instead of nine.

There is a graph for each size of a step's own graph and each kind of draw, captured while the engine is idle, or once
enough steps have lacked it.
A graph reads the logits where the step's graph writes them, and the rows' options where the sampler keeps them.
"""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.execution.graphs import (
    CAPTURE_AFTER_MISSES,
    Captured,
    CudaCapture,
    NotCaptured,
    Outputs,
    StepGraphs,
)
from cortex.neuron.engine.sampling.sampler import KINDS, Drawn, Sampler
from cortex.neuron.engine.uploads import host_memory_for
from cortex.neuron.kernels.sampling.draw import DrawnTokens
from cortex.neuron.kernels.sampling.rows import ADJUSTING, Draws

log = logging.getLogger(__name__)


class DrawGraphs:
    """Belongs to the engine thread."""

    def __init__(self, sampler: Sampler, last_tokens: Tensor) -> None:
        """`last_tokens`: of the rows, the last being the padding row; each draw replaces them."""
        self._sampler = sampler
        self._last_tokens = last_tokens
        self._captures = {kind: CudaCapture() for kind in KINDS}
        self._captured: dict[tuple[int, int], Captured] = {}
        self._missed: Counter[tuple[int, int]] = Counter()
        self._is_given_up = False
        """A capture failed, so no more are tried: draws run without graphs and need the memory more."""
        self._tables = sampler.tables
        """The memory that graphs of changed logits read. When the sampler has enlarged it, they are captured again."""

    def prepare(self, steps: StepGraphs) -> bool:
        """Captures one more graph, for a size that a step of one token per row has; false if none is left."""
        self._forget_old()
        for size in steps.captured_sizes:
            for kind in KINDS:
                if (size, kind) not in self._captured:
                    return self._add(steps.all_logits(size), kind)
        return False

    def _forget_old(self) -> None:
        if self._tables is not self._sampler.tables:
            old = [key for key in self._captured if key[1] & ADJUSTING]
            for key in old:
                del self._captured[key]
                self._captures[key[1]] = CudaCapture()
            self._missed.clear()
            self._tables = self._sampler.tables

    def draw(self, logits: Tensor, lines: NDArray[np.int64]) -> Drawn | None:
        """Draws for `lines`, which have no grammar, from all logits of a step's graph: [size, vocab], the first ones in
        the order of `lines`. None if there is no graph for it yet."""
        self._forget_old()
        size, count, rows = len(logits), len(lines), lines[:, 1]
        key = (size, self._sampler.kind(rows))
        captured = self._captured.get(key)
        if captured is None:
            self._missed[key] += 1
            if self._missed[key] < CAPTURE_AFTER_MISSES or not self._add(logits, key[1]):
                return None
            captured = self._captured[key]
        (memory,) = captured.inputs
        host = host_memory_for(memory)
        array = host.numpy()
        array[:count], array[count:] = lines, self._padding(size)[count:]
        memory.copy_(host, non_blocking=True)
        captured.graph.replay(count)
        drawn = DrawnTokens(*(output[:count] for output in captured.outputs))
        return self._sampler.with_logprobs(drawn, logits, Draws(memory[:count], self._sampler.no_mask), rows)

    def _padding(self, size: int) -> NDArray[np.int64]:
        """Lines of rows that draw greedily, and whose tokens nobody reads."""
        places, padding_row = np.arange(size), len(self._last_tokens) - 1
        columns = (places, np.full(size, padding_row), np.zeros(size), places, np.full(size, -1), np.full(size, -1))
        return np.stack(columns, axis=1).astype(np.int64)

    def _add(self, logits: Tensor, kind: int) -> bool:
        """Captures a graph for the size of `logits`; false if that is not possible."""
        if self._is_given_up:
            return False
        lines = torch.from_numpy(self._padding(len(logits))).to(logits.device)
        draws = Draws(lines, self._sampler.no_mask)

        def step() -> Outputs:
            drawn = self._sampler.compute(logits, draws, kind)
            self._last_tokens.index_copy_(0, draws.rows, drawn.tokens)
            return drawn

        try:
            captured = Captured(*self._captures[kind](step), (lines,))
        except (NotCaptured, torch.OutOfMemoryError):
            log.info(
                "sampling of %d rows runs one operation at a time: it cannot be captured as a CUDA graph", len(logits)
            )
            self._is_given_up = True
            return False
        captured.replay_first(len(logits))
        self._captured[len(logits), kind] = captured
        return True
