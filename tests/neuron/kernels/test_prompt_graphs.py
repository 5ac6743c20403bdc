"""Steps of short prompts, padded to the size of a graph: through the GPU's kernels, as the steps without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cortex.neuron.engine.execution.graphs import Capture, CudaCapture, Graph, Outputs
from cortex.neuron.engine.execution.inputs import StepInputs
from cortex.neuron.engine.execution.prompt_graphs import MAX_PROMPTS, PromptGraphs
from cortex.neuron.engine.memory.plan import StateSlots
from cortex.neuron.engine.memory.sequences import SequenceMemory
from cortex.neuron.engine.step_plan import RowInputs, RowPlan, StepPlan
from cortex.neuron.kernels.batch import Batch, PrefillRow, prefill_tiles
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.registry import read_architecture

from .conftest import AssertClose
from .test_batch_invariant import DENSE, FAMILIES

PAGE_TOKENS, PAGES_PER_ROW, ROWS = 4, 6, 3
SIZE = 16
WINDOWED = DENSE | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
MODELS = FAMILIES | {"windows": WINDOWED}
TEXTS = {0: (3, 14, 15, 9, 26, 5, 35, 8, 9, 7), 1: (53, 58, 9), 2: (7, 9, 3, 2)}


class Again:
    """Captures on a CPU: a replay computes the step again."""

    def __call__(self, step: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        return _Again(step), step()


class _Again:
    def __init__(self, step: Callable[[], Outputs]) -> None:
        self._step = step

    def replay(self, rows: int) -> None:
        del rows
        self._step()


class Model:
    """A model with random weights, and empty memory for some rows."""

    def __init__(self, family: str, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(2)
        self._device = device
        self.decoder = Decoder(read_architecture(MODELS[family]), Parameters(device, dtype), 64)
        for binding in self.decoder.parameters.bindings:
            torch.nn.init.normal_(binding.destination, std=0.3)
        num_pages = 1 + ROWS * PAGES_PER_ROW
        windows = self.decoder.architecture.windows
        SequenceMemory(self.decoder, dict.fromkeys(windows, num_pages), PAGE_TOKENS, StateSlots(ROWS), dtype, device)
        pages = np.arange(1, num_pages, dtype=np.int32).reshape(ROWS, PAGES_PER_ROW)
        pages = np.concatenate((pages, np.zeros((1, PAGES_PER_ROW), np.int32)))  # the last: padding
        self._pages = [pages] * len(windows)
        self._tables = [self._upload(each) for each in self._pages]
        self.graphs = PromptGraphs(self.decoder, self._tables, ROWS, (SIZE,), self._capture())

    def _capture(self) -> Capture:
        return CudaCapture() if self._device.type == "cuda" else Again()

    def plan(self, *spans: tuple[int, int, int]) -> tuple[StepPlan, StepInputs]:
        """(row, start, end) each."""
        rows = tuple(RowPlan(row, start, RowInputs(end - start, TEXTS[row][start:end])) for row, start, end in spans)
        plan = StepPlan(rows, 0, (), ())
        return plan, StepInputs.of(plan, self._pages, PAGE_TOKENS)

    def eager(self, *spans: tuple[int, int, int]) -> Tensor:
        plan, inputs = self.plan(*spans)
        slots, *others = self._upload(inputs.slots)
        batch = Batch(
            tokens=self._upload(inputs.tokens),
            positions=self._upload(inputs.positions),
            slots=slots,
            rows=self._upload(inputs.rows),
            lengths=self._upload(inputs.lengths),
            page_table=self._tables[0],
            num_decodes=0,
            max_length=int(inputs.lengths.max()),
            prefills=tuple(
                PrefillRow(row.row, row.start, row.count, int(offset))
                for row, offset in zip(plan.rows, inputs.offsets, strict=False)
            ),
            prefill_offsets=self._upload(inputs.offsets.astype(np.int32)),
            prefill_tiles=self._upload(prefill_tiles([row.count for row in plan.rows])),
        ).with_groups(others, self._tables[1:])
        return self.decoder(batch)

    def replayed(self, *spans: tuple[int, int, int]) -> Tensor:
        plan, inputs = self.plan(*spans)
        assert self.graphs.take(plan, inputs)
        return self.graphs.replay(inputs).clone()

    def _upload(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


STEPS = (((0, 0, 6), (1, 0, 3)), ((0, 6, 10), (2, 0, 4)))
"""A prompt and another; then what follows the first as if it were cached, together with a third."""


@torch.inference_mode()
@pytest.mark.parametrize("family", MODELS)
def test_padded_steps_compute_what_others_do(family: str, device: torch.device, assert_close: AssertClose) -> None:
    """In float32: rounded to half precision, a GEMM of another number of rows may choose other experts."""
    plain, padded = Model(family, device, torch.float32), Model(family, device, torch.float32)
    plan, inputs = padded.plan(*STEPS[0])
    assert not padded.graphs.take(plan, inputs)  # not captured yet
    assert padded.graphs.prepare()
    assert not padded.graphs.prepare()
    for spans in STEPS:
        assert_close(padded.replayed(*spans), plain.eager(*spans))


@torch.inference_mode()
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", MODELS)
def test_graph_gives_the_bits_of_the_launches_that_it_replaces(
    family: str, device: torch.device, dtype: torch.dtype
) -> None:
    class Launches(Model):
        def _capture(self) -> Capture:
            return Again()

    graph, launches = Model(family, device, dtype), Launches(family, device, dtype)
    for model in (graph, launches):
        assert model.graphs.prepare()
    for spans in STEPS:
        assert torch.equal(graph.replayed(*spans), launches.replayed(*spans))


@torch.inference_mode()
def test_steps_with_single_tokens_or_many_rows_are_not_taken(device: torch.device, dtype: torch.dtype) -> None:
    model = Model("dense", device, dtype)
    assert model.graphs.prepare()
    plan, inputs = model.plan((0, 0, 6))
    assert model.graphs.take(plan, inputs)
    single, many = StepPlan(plan.rows, 1, (), ()), StepPlan(plan.rows * (MAX_PROMPTS + 1), 0, (), ())
    assert not model.graphs.take(single, inputs)
    assert not model.graphs.take(many, inputs)
    assert not model.graphs.take(*model.plan((0, 0, 10), (1, 0, 3), (2, 0, 4)))  # more tokens than the largest size
