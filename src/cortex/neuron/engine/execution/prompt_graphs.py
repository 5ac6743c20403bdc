"""Whole steps that compute short prompts, or what follows a cached prefix, as graphs: one replay instead of hundreds of
launches, which take the host longer than the device takes to compute them.

There is a graph for each of some numbers of tokens. A step takes the smallest that fits and pads: its last tokens
belong to no row, and its last rows and tiles are empty. Everything that differs from step to step is in the graph's
input. Graphs are captured while the engine is idle only. Until then, and above the largest, steps run one launch per
operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.execution.graphs import Capture, GraphSizes, Outputs, SizedGraphs
from cortex.neuron.engine.execution.inputs import StepInputs
from cortex.neuron.engine.pages import PADDING_PAGE
from cortex.neuron.engine.step_plan import StepPlan
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


def num_tiles(size: int) -> int:
    """Tiles that `size` tokens of up to MAX_PROMPTS rows have at most. Pure."""
    return min(size, -(-size // PREFILL_TILE) + MAX_PROMPTS - 1)


def prompt_sizes(max_tokens: int, max_captured: int) -> tuple[int, ...]:
    """The sizes of the graphs of a model whose steps have up to `max_tokens`, of which `max_captured` can be captured.
    Pure."""
    smaller = [size for size in PROMPT_SIZES if size < max_tokens]
    return tuple(size for size in PROMPT_SIZES[: len(smaller) + 1] if size <= max_captured)


def arranged(
    size: int, num_groups: int, padding_row: int, inputs: StepInputs | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The input of a graph of `size` tokens: [3 + KV groups, size], with tokens, positions, positions of the rotation
    and slots; and for each row its index and its length, then where each begins, then the tiles. Without `inputs` no
    row has tokens. Pure."""
    by_token = np.zeros((3 + num_groups, size), dtype=np.int64)
    by_token[3:] = PADDING_PAGE
    rows, lengths = np.full(_NUM_ROWS, padding_row, dtype=np.int64), np.zeros(_NUM_ROWS, dtype=np.int64)
    offsets = np.zeros(_NUM_OFFSETS, dtype=np.int64)
    tiles = np.tile(np.array((MAX_PROMPTS, 0), dtype=np.int64), (num_tiles(size), 1))
    if inputs is not None:
        count, num_rows = len(inputs.tokens), len(inputs.rows)
        by_token[0, :count], by_token[1, :count], by_token[3:, :count] = inputs.tokens, inputs.positions, inputs.slots
        by_token[2, :count] = inputs.positions if inputs.rope is None else inputs.rope
        rows[:num_rows], lengths[:num_rows] = inputs.rows, inputs.lengths
        offsets[: num_rows + 1], offsets[num_rows + 1 :] = inputs.offsets, count
        used = prefill_tiles(np.diff(inputs.offsets).tolist())
        tiles[: len(used)] = used
    return by_token, np.concatenate((rows, lengths, offsets, tiles.reshape(-1)))


class PromptGraphs(SizedGraphs):
    """The graphs of one model's prompts. The inputs of a graph are its memory, and the two parts of it that `arranged`
    describes."""

    def __init__(
        self, model: Decoder, page_tables: Sequence[Tensor], padding_row: int, sizes: Sequence[int], capture: Capture
    ) -> None:
        """`page_tables`: of each KV group. `sizes`: at least one, in ascending order."""
        parameters, largest = model.parameters, sizes[-1]
        super().__init__(GraphSizes(largest, sizes, largest_second=True), capture, parameters.group, parameters.device)
        self._model = model
        self._page_tables = tuple(page_tables)
        self._padding_row = padding_row
        self._token_room = token_room(model.architecture, WeightStorage(parameters.dtype.itemsize))
        self._hidden = torch.empty((largest, model.config.hidden), dtype=parameters.dtype, device=parameters.device)
        """What all graphs write: one of them runs at a time."""

    def take(self, plan: StepPlan, inputs: StepInputs) -> bool:
        """Whether a captured graph computes this step: one of prompts of several tokens, without pictures."""
        is_plain = plan.num_singles == 0 and inputs.pictures is None and len(plan.rows) <= MAX_PROMPTS
        return is_plain and self._sizes.serving(plan.num_tokens) is not None

    def replay(self, inputs: StepInputs) -> Tensor:
        """Runs a step that they take. → [tokens, hidden]: the residual stream after the last layer, valid until the
        next replay, in stream order."""
        num_tokens = len(inputs.tokens)
        captured = self._serving(num_tokens)
        memory, by_token, _ = captured.inputs
        host = self._flat(by_token.shape[1], inputs)
        memory.copy_(host.pin_memory() if memory.is_cuda else host, non_blocking=True)
        captured.graph.replay(num_tokens)
        return self._hidden[:num_tokens]

    def _flat(self, size: int, inputs: StepInputs | None) -> Tensor:
        by_token, by_row = arranged(size, len(self._page_tables), self._padding_row, inputs)
        return torch.from_numpy(np.concatenate((by_token.reshape(-1), by_row)))

    def _inputs(self, size: int) -> tuple[Tensor, ...]:
        memory = self._flat(size, None).to(self._device)
        num_by_token = 3 + len(self._page_tables)
        return memory, memory[: num_by_token * size].view(num_by_token, size), memory[num_by_token * size :]

    def _room_bytes(self, size: int) -> int:
        return 2 * size * self._token_room

    def _step(self, *inputs: Tensor) -> Outputs:
        _, by_token, by_row = inputs
        tokens, positions, rope, slots, *others = by_token.unbind()
        small = by_row[_NUM_ROWS:].to(torch.int32)
        first, *tables = self._page_tables
        batch = Batch(
            tokens=tokens,
            positions=positions,
            slots=slots,
            rows=by_row[:_NUM_ROWS],
            lengths=small[:_NUM_ROWS],
            page_table=first,
            num_decodes=0,
            max_length=0,
            prefill_offsets=small[_NUM_ROWS:][: _NUM_ROWS + 1],
            prefill_tiles=small[_NUM_ROWS + _NUM_OFFSETS :].view(-1, 2),
            is_padded=True,
            rope=rope if self._model.architecture.pictures.has_axes else None,
        ).with_groups(others, tables)
        return (self._hidden[: len(tokens)].copy_(self._model(batch)),)
