"""Graphs of whole steps that compute short prompts or the rest after a cached prefix: one replay instead of hundreds of
launches, which take the host longer than the device computes. Some also decode running streams, so that the weights are
read once for both.

There is a graph for each of some numbers of tokens. A step takes the smallest that fits and pads: its last tokens
belong to no row, and its last rows and tiles are empty. The tokens of streams come first, padded to a number of their
own. Everything that differs from step to step is in the graph's
input. Graphs are captured while the engine is idle only. Until then, and above the largest, steps run one launch per
operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.execution.graphs import Capture, GraphSizes, Outputs, SizedGraphs
from cortex.neuron.engine.execution.inputs import StepInputs
from cortex.neuron.engine.kv.pages import PADDING_PAGE
from cortex.neuron.engine.scheduling.step_plan import StepPlan
from cortex.neuron.engine.uploads import host_memory_for
from cortex.neuron.kernels.batch import PREFILL_TILE, Batch, prefill_tiles
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.sizes import WeightStorage, token_room

PROMPT_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, *range(1024, 2049, 128))
"""Token counts. GEMMs of a few hundred rows or more use tiles of 128, so padding to the next size costs little."""
MAX_PROMPTS = 7
"""Rows of a graph that may have tokens. One further row is always empty and owns the empty tiles."""
_NUM_ROWS = MAX_PROMPTS + 1
_NUM_OFFSETS = 12
"""_NUM_ROWS + 1, and unused ones: what follows begins at a multiple of 16 bytes, as the kernels expect."""


STREAM_SIZES = (16, 32, 48, 64, 128, 256)
"""Numbers of streams of the graphs that compute them and prompts in one pass."""
MIXED_SIZES, MIXED_TOTALS = (16, 64), (128, 192, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280)
"""Their numbers of tokens of prompts, and of both together."""


def num_tiles(size: int) -> int:
    """Tiles that `size` tokens of up to MAX_PROMPTS rows have at most. Pure."""
    return min(size, -(-size // PREFILL_TILE) + MAX_PROMPTS - 1)


def prompt_sizes(max_tokens: int, max_captured: int) -> tuple[int, ...]:
    """The sizes of the graphs of a model whose steps have up to `max_tokens`; graphs up to `max_captured` can be
    captured. Pure."""
    smaller = [size for size in PROMPT_SIZES if size < max_tokens]
    return tuple(size for size in PROMPT_SIZES[: len(smaller) + 1] if size <= max_captured)


def stream_sizes(max_rows: int) -> tuple[int, ...]:
    """The numbers of streams of a model's graphs, if it runs up to `max_rows` sequences. Pure."""
    return tuple(size for size in STREAM_SIZES if size < 2 * max_rows) or STREAM_SIZES[:1]


def mixed_sizes(num_streams: int) -> tuple[int, ...]:
    """Numbers of tokens of prompts of the graphs of `num_streams`. Pure."""
    rest = (total - num_streams for total in MIXED_TOTALS)
    return (*MIXED_SIZES, *(size for size in rest if size > MIXED_SIZES[-1]))


def empty_input(size: int, num_groups: int, padding_row: int, num_streams: int = 0) -> NDArray[np.int64]:
    """The input of a graph of `size` tokens of prompts and `num_streams` streams that has none: for each token of
    [3 + KV groups, streams + size] its id, its position, the position of its rotation and its slots; then for each row
    its index and its length; then where each prompt begins; then their cuts; then the tiles. Pure."""
    by_token = np.zeros((3 + num_groups, num_streams + size), dtype=np.int64)
    by_token[3:] = PADDING_PAGE
    num_rows = num_streams + _NUM_ROWS
    rows, lengths = np.full(num_rows, padding_row, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    lengths[:num_streams] = 1
    offsets, cuts = np.zeros(_NUM_OFFSETS, dtype=np.int64), np.zeros(2 * _NUM_ROWS, dtype=np.int64)
    tiles = np.tile(np.array((MAX_PROMPTS, 0), dtype=np.int64), num_tiles(size))
    return np.concatenate((by_token.reshape(-1), rows, lengths, offsets, cuts, tiles))


def arrange(
    memory: NDArray[np.int64], size: int, inputs: StepInputs, num_streams: int = 0, num_singles: int = 0
) -> None:
    """Writes the rows of a step, the first `num_singles` of them streams, into what `empty_input` returned."""
    width, num_by_token, all_rows = num_streams + size, 3 + len(inputs.slots), num_streams + _NUM_ROWS
    by_token, by_row = memory[: num_by_token * width].reshape(num_by_token, width), memory[num_by_token * width :]
    count, num_prompts = len(inputs.tokens) - num_singles, len(inputs.rows) - num_singles
    rope = inputs.positions if inputs.rope is None else inputs.rope
    parts = ((0, slice(0, num_singles), num_singles), (num_streams, slice(num_singles, None), count))
    for first, given, length in parts:
        for line, values in enumerate((inputs.tokens, inputs.positions, rope, *inputs.slots)):
            by_token[line, first : first + length] = values[given]
    parts = ((0, slice(0, num_singles), num_singles), (num_streams, slice(num_singles, None), num_prompts))
    for first, given, length in parts:
        by_row[first : first + length] = inputs.rows[given]
        by_row[all_rows + first : all_rows + first + length] = inputs.lengths[given]
    offsets, rest = by_row[2 * all_rows :][:_NUM_OFFSETS], by_row[2 * all_rows + _NUM_OFFSETS :]
    begins = inputs.offsets[num_singles:] - num_singles
    offsets[: num_prompts + 1], offsets[num_prompts + 1 :] = begins, count
    used = prefill_tiles([end - start for start, end in pairwise(begins.tolist())]).reshape(-1)
    rest[: 2 * num_prompts], rest[2 * _NUM_ROWS :][: len(used)] = inputs.cuts[num_singles:].reshape(-1), used


class PromptGraphs(SizedGraphs):
    """The graphs of one model's prompts, or of prompts and up to `num_streams` streams. The inputs of a graph are its
    memory, which `empty_input` describes, and the parts of it for tokens and for rows."""

    def __init__(
        self,
        model: Decoder,
        page_tables: Sequence[Tensor],
        last_tokens: Tensor,
        sizes: Sequence[int],
        capture: Capture,
        *,
        num_streams: int = 0,
        context_tokens: int = 0,
    ) -> None:
        """`page_tables`: of each KV group. `last_tokens`: of each row; the last row is padding. `sizes`: at least one,
        in ascending order. `context_tokens`: the most that a stream has."""
        parameters, largest = model.parameters, sizes[-1]
        super().__init__(GraphSizes(largest, sizes, largest_second=True), capture, parameters.group, parameters.device)
        self._model = model
        self._page_tables = tuple(page_tables)
        self._last_tokens = last_tokens
        self.num_streams = num_streams
        self._context_tokens = context_tokens
        self._empty_inputs: dict[int, NDArray[np.int64]] = {}
        """By size, of the graphs that were captured or tried."""
        self._token_room = token_room(model.architecture, WeightStorage(parameters.dtype.itemsize, parameters.packing))
        shape = (num_streams + largest, model.config.hidden)
        self._hidden = torch.empty(shape, dtype=parameters.dtype, device=parameters.device)
        """The output of all graphs, of which only one runs at a time."""

    def take(self, plan: StepPlan, inputs: StepInputs) -> bool:
        """Whether a captured graph can compute this step: prompts of several tokens, without pictures, and streams if
        the graphs support them."""
        prompts, singles = plan.rows[plan.num_singles :], plan.num_singles
        has_streams = singles <= self.num_streams and (singles > 0) == (self.num_streams > 0)
        is_plain = has_streams and inputs.pictures is None and 0 < len(prompts) <= MAX_PROMPTS
        is_mixed = is_plain and singles > 0
        if is_mixed and (plan.num_proposals is not None or any(row.decodes for row in prompts)):
            return False
        return is_plain and self.serves(plan.num_tokens - singles)

    def replay(self, inputs: StepInputs, num_singles: int = 0) -> Tensor:
        """Runs a step for which `take` returned true; the streams' tokens are their rows' latest. → [tokens, hidden]:
        the residual stream after the last layer, valid until the next replay, in stream order."""
        num_tokens = len(inputs.tokens) - num_singles
        captured = self._serving(num_tokens)
        memory, by_token, _ = captured.inputs
        size = by_token.shape[1] - self.num_streams
        host = host_memory_for(memory)
        array = host.numpy()
        array[:] = self._empty_inputs[size]
        arrange(array, size, inputs, self.num_streams, num_singles)
        memory.copy_(host, non_blocking=True)
        captured.graph.replay(self.num_streams + num_tokens)
        if not self.num_streams:
            return self._hidden[:num_tokens]
        return torch.cat((self._hidden[:num_singles], self._hidden[self.num_streams :][:num_tokens]))

    def _inputs(self, size: int) -> tuple[Tensor, ...]:
        padding_row = len(self._last_tokens) - 1
        self._empty_inputs[size] = empty_input(size, len(self._page_tables), padding_row, self.num_streams)
        memory = torch.tensor(self._empty_inputs[size], device=self._device)
        num_by_token, width = 3 + len(self._page_tables), self.num_streams + size
        return memory, memory[: num_by_token * width].view(num_by_token, width), memory[num_by_token * width :]

    def _room_bytes(self, size: int) -> int:
        return 2 * (self.num_streams + size) * self._token_room

    def compute(self, size: int) -> None:
        """Computes a step of `size` empty tokens of prompts, whether or not there is a graph for it."""
        self._model(self._batch(*self._inputs(size)))

    def _step(self, *inputs: Tensor) -> Outputs:
        batch = self._batch(*inputs)
        return (self._hidden[: len(batch.tokens)].copy_(self._model(batch)),)

    def _batch(self, _memory: Tensor, by_token: Tensor, by_row: Tensor) -> Batch:
        tokens, positions, rope, slots, *others = by_token.unbind()
        streams, num_rows = self.num_streams, self.num_streams + _NUM_ROWS
        rows, small = by_row[:num_rows], by_row[num_rows:].to(torch.int32)
        lengths, offsets, cuts, tiles = small.split(
            (num_rows, _NUM_OFFSETS, 2 * _NUM_ROWS, len(small) - num_rows - _NUM_OFFSETS - 2 * _NUM_ROWS)
        )
        if streams:
            tokens = torch.cat((self._last_tokens.index_select(0, rows[:streams]), tokens[streams:]))
        first, *tables = self._page_tables
        return Batch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            rows=rows,
            lengths=lengths,
            page_table=first,
            num_decodes=streams,
            max_length=self._context_tokens if streams else 0,
            prefill_offsets=offsets[: _NUM_ROWS + 1],
            prefill_tiles=tiles.view(-1, 2),
            prefill_cuts=cuts.view(-1, 2),
            is_padded=True,
            rope=rope if self._model.architecture.pictures.has_axes else None,
        ).with_groups(others, tables)
