"""Whole steps that compute short prompts, or what follows a cached prefix, as graphs: one replay instead of hundreds of
launches, which take the host longer than the device takes to compute them.

There is a graph for each of some numbers of tokens. A step takes the smallest that fits and pads: its last tokens
belong to no row, and its last rows and tiles are empty. Everything that differs from step to step is in the graph's
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
"""Numbers of tokens. A GEMM of a few hundred rows and more computes them in tiles of 128, so that padding to the next
size costs little."""
MAX_PROMPTS = 3
"""Rows of a graph that may have tokens. One more row never has any: tiles without tokens are its tiles."""
_NUM_ROWS = MAX_PROMPTS + 1
_NUM_OFFSETS = 8
"""_NUM_ROWS + 1, and unused ones: what follows begins at a multiple of 16 bytes, as the kernels expect."""


MAX_PART_STREAMS = 64
MAX_PART_TOKENS = 512
"""Beyond these, the device computes a step of streams and prompts for longer than the host launches its operations."""


def parts_of(plan: StepPlan) -> tuple[StepPlan, ...]:
    """A step of few streams and short prompts in two parts, the rows of one token and the prompts, each of which is the
    replay of a graph; any other step as it is. The weights are read twice then, which takes the device less time than
    the host needs to launch one pass for both, operation by operation. Pure."""
    singles, others = plan.rows[: plan.num_singles], plan.rows[plan.num_singles :]
    is_small = 0 < len(singles) <= MAX_PART_STREAMS and 0 < len(others) <= MAX_PROMPTS
    if not is_small or plan.num_tokens - len(singles) > MAX_PART_TOKENS or plan.num_proposals is not None:
        return (plan,)
    if any(row.decodes for row in others) or any(
        row.inputs.pictures or row.outputs.scores is not None for row in plan.rows
    ):
        return (plan,)
    return StepPlan(singles, len(singles), (), ()), StepPlan(others, 0, (), ())


def num_tiles(size: int) -> int:
    """Tiles that `size` tokens of up to MAX_PROMPTS rows have at most. Pure."""
    return min(size, -(-size // PREFILL_TILE) + MAX_PROMPTS - 1)


def prompt_sizes(max_tokens: int, max_captured: int) -> tuple[int, ...]:
    """The sizes of the graphs of a model whose steps have up to `max_tokens`, of which `max_captured` can be captured.
    Pure."""
    smaller = [size for size in PROMPT_SIZES if size < max_tokens]
    return tuple(size for size in PROMPT_SIZES[: len(smaller) + 1] if size <= max_captured)


def empty_input(size: int, num_groups: int, padding_row: int) -> NDArray[np.int64]:
    """The input of a graph of `size` tokens whose rows have none: for each token of [3 + KV groups, size] its id, its
    position, the position of its rotation and its slots; then for each row its index and its length; then where each
    row begins; then their cuts; then the tiles. Pure."""
    by_token = np.zeros((3 + num_groups, size), dtype=np.int64)
    by_token[3:] = PADDING_PAGE
    rows, lengths = np.full(_NUM_ROWS, padding_row, dtype=np.int64), np.zeros(_NUM_ROWS, dtype=np.int64)
    offsets, cuts = np.zeros(_NUM_OFFSETS, dtype=np.int64), np.zeros(2 * _NUM_ROWS, dtype=np.int64)
    tiles = np.tile(np.array((MAX_PROMPTS, 0), dtype=np.int64), num_tiles(size))
    return np.concatenate((by_token.reshape(-1), rows, lengths, offsets, cuts, tiles))


def arrange(memory: NDArray[np.int64], size: int, inputs: StepInputs) -> None:
    """Writes the rows of a step into what `empty_input` returned for `size` tokens."""
    count, num_rows, num_by_token = len(inputs.tokens), len(inputs.rows), 3 + len(inputs.slots)
    by_token, by_row = memory[: num_by_token * size].reshape(num_by_token, size), memory[num_by_token * size :]
    by_token[0, :count], by_token[1, :count], by_token[3:, :count] = inputs.tokens, inputs.positions, inputs.slots
    by_token[2, :count] = inputs.positions if inputs.rope is None else inputs.rope
    by_row[:num_rows], by_row[_NUM_ROWS : _NUM_ROWS + num_rows] = inputs.rows, inputs.lengths
    offsets, rest = by_row[2 * _NUM_ROWS :][:_NUM_OFFSETS], by_row[2 * _NUM_ROWS + _NUM_OFFSETS :]
    offsets[: num_rows + 1], offsets[num_rows + 1 :] = inputs.offsets, count
    ends = inputs.offsets.tolist()
    used = prefill_tiles([end - start for start, end in pairwise(ends)]).reshape(-1)
    rest[: 2 * num_rows], rest[2 * _NUM_ROWS :][: len(used)] = inputs.cuts.reshape(-1), used


class PromptGraphs(SizedGraphs):
    """The graphs of one model's prompts. The inputs of a graph are its memory, which `empty_input` describes, and the
    parts of it for tokens and for rows."""

    def __init__(
        self, model: Decoder, page_tables: Sequence[Tensor], padding_row: int, sizes: Sequence[int], capture: Capture
    ) -> None:
        """`page_tables`: of each KV group. `sizes`: at least one, in ascending order."""
        parameters, largest = model.parameters, sizes[-1]
        super().__init__(GraphSizes(largest, sizes, largest_second=True), capture, parameters.group, parameters.device)
        self._model = model
        self._page_tables = tuple(page_tables)
        self._padding_row = padding_row
        self._empty_inputs: dict[int, NDArray[np.int64]] = {}
        """By size, of the graphs that were captured or tried."""
        self._token_room = token_room(model.architecture, WeightStorage(parameters.dtype.itemsize))
        self._hidden = torch.empty((largest, model.config.hidden), dtype=parameters.dtype, device=parameters.device)
        """What all graphs write: one of them runs at a time."""

    def take(self, plan: StepPlan, inputs: StepInputs) -> bool:
        """Whether a captured graph computes this step: one of prompts of several tokens, without pictures."""
        is_plain = plan.num_singles == 0 and inputs.pictures is None and len(plan.rows) <= MAX_PROMPTS
        return is_plain and self.serves(plan.num_tokens)

    def replay(self, inputs: StepInputs) -> Tensor:
        """Runs a step that they take. → [tokens, hidden]: the residual stream after the last layer, valid until the
        next replay, in stream order."""
        num_tokens = len(inputs.tokens)
        captured = self._serving(num_tokens)
        memory, by_token, _ = captured.inputs
        size = by_token.shape[1]
        host = host_memory_for(memory)
        array = host.numpy()
        array[:] = self._empty_inputs[size]
        arrange(array, size, inputs)
        memory.copy_(host, non_blocking=True)
        captured.graph.replay(num_tokens)
        return self._hidden[:num_tokens]

    def _inputs(self, size: int) -> tuple[Tensor, ...]:
        self._empty_inputs[size] = empty_input(size, len(self._page_tables), self._padding_row)
        memory = torch.tensor(self._empty_inputs[size], device=self._device)
        num_by_token = 3 + len(self._page_tables)
        return memory, memory[: num_by_token * size].view(num_by_token, size), memory[num_by_token * size :]

    def _room_bytes(self, size: int) -> int:
        return 2 * size * self._token_room

    def compute(self, size: int) -> None:
        """Computes a step of `size` empty tokens of prompts, whether or not there is a graph for it."""
        self._model(self._batch(*self._inputs(size)))

    def _step(self, *inputs: Tensor) -> Outputs:
        batch = self._batch(*inputs)
        return (self._hidden[: len(batch.tokens)].copy_(self._model(batch)),)

    def _batch(self, _memory: Tensor, by_token: Tensor, by_row: Tensor) -> Batch:
        tokens, positions, rope, slots, *others = by_token.unbind()
        small = by_row[_NUM_ROWS:].to(torch.int32)
        lengths, offsets, cuts, tiles = small.split(
            (_NUM_ROWS, _NUM_OFFSETS, 2 * _NUM_ROWS, len(small) - 3 * _NUM_ROWS - _NUM_OFFSETS)
        )
        first, *tables = self._page_tables
        return Batch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            rows=by_row[:_NUM_ROWS],
            lengths=lengths,
            page_table=first,
            num_decodes=0,
            max_length=0,
            prefill_offsets=offsets[: _NUM_ROWS + 1],
            prefill_tiles=tiles.view(-1, 2),
            prefill_cuts=cuts.view(-1, 2),
            is_padded=True,
            rope=rope if self._model.architecture.pictures.has_axes else None,
        ).with_groups(others, tables)
