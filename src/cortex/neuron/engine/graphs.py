"""Whole single-token steps as CUDA graphs: one replay instead of hundreds of launches.

A graph is captured for each of a few batch sizes; a step takes the next larger one and pads. Everything a graph reads
is at a fixed address: its input buffer, the page table, the rows' latest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.pages import PADDING_PAGE
from cortex.neuron.kernels.batch import Batch
from cortex.neuron.models.decoder import Decoder

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """[3, size] int64: rows, positions, slots"""
    logits: Tensor
    tokens: Tensor
    healthy: Tensor


class StepGraphs:
    """The captured graphs of one model, sharing one memory pool."""

    def __init__(
        self, model: Decoder, page_table: Tensor, last_tokens: Tensor, padding_row: int, context_tokens: int
    ) -> None:
        self._model = model
        self._page_table = page_table
        self._last_tokens = last_tokens
        self._padding_row = padding_row
        self._context_tokens = context_tokens
        self._sizes = [size for size in SIZES if size < padding_row] + [padding_row]
        self._captured: dict[int, _Captured] = {}
        self._pool: Any = None

    @property
    def largest(self) -> int:
        """Rows a graph can take; 0 until something is captured."""
        return max(self._captured, default=0)

    def capture(self) -> None:
        """Captures every size, the largest first so that the smaller ones reuse its memory."""
        for size in reversed(self._sizes):
            self._captured[size] = self._capture(size)
        torch.cuda.synchronize()

    def replay(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, likeliest tokens and health of each row; valid until the next replay, in stream order."""
        count = len(rows)
        size = next(size for size in self._sizes if size >= count)
        captured = self._captured[size]
        inputs = self._padding(size)
        inputs[0, :count], inputs[1, :count], inputs[2, :count] = rows, positions, slots
        captured.inputs.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured.logits[:count], captured.tokens[:count], captured.healthy[:count]

    def _padding(self, size: int) -> NDArray[np.int64]:
        inputs = np.zeros((3, size), dtype=np.int64)
        inputs[0] = self._padding_row
        inputs[2] = PADDING_PAGE
        return inputs

    def _capture(self, size: int) -> _Captured:
        inputs = torch.from_numpy(self._padding(size)).to(self._page_table.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(inputs)  # compiles kernels and makes the libraries allocate what they keep
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, tokens, healthy = self._step(inputs)
        self._pool = self._pool or graph.pool()
        return _Captured(graph, inputs, logits, tokens, healthy)

    def _step(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, positions, slots = inputs
        batch = Batch(
            tokens=self._last_tokens[rows],
            positions=positions,
            slots=slots,
            rows=rows,
            lengths=(positions + 1).to(torch.int32),
            page_table=self._page_table,
            num_decodes=len(rows),
            max_length=self._context_tokens,
        )
        logits = self._model.logits(self._model(batch))
        highest, tokens = logits.max(-1)
        self._last_tokens.index_copy_(0, rows, tokens)
        return logits, tokens, highest.isfinite()
