"""Steps of short prompts, padded to the size of a graph: through the GPU's kernels, as the steps without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cortex.neuron.engine.execution.graphs import Capture, CudaCapture, Graph, NotCaptured, Outputs
from cortex.neuron.engine.execution.inputs import StepInputs
from cortex.neuron.engine.execution.prompt_graphs import MAX_PROMPTS, PromptGraphs
from cortex.neuron.engine.execution.results import RowResult
from cortex.neuron.engine.execution.runner import Runner, RunnerConfig
from cortex.neuron.engine.memory.plan import StateSlots
from cortex.neuron.engine.memory.sequences import SequenceMemory
from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.engine.sampling.sampler import Draw
from cortex.neuron.engine.scheduling.step_plan import DRAW_ONE, LATEST_TOKEN, RowInputs, RowPlan, StateCut, StepPlan
from cortex.neuron.kernels.batch import Batch, PrefillRow, prefill_tiles
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.registry import read_architecture

from ..engine.execution.replays import ReplayOnCpu
from .conftest import AssertClose
from .test_batch_invariant import DENSE, FAMILIES

PAGE_TOKENS, PAGES_PER_ROW, ROWS = 4, 6, 4
SIZE = 12
WINDOWED = DENSE | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
MODELS = FAMILIES | {"dense": WINDOWED}
"""The second layer of the dense model is that of the family, so both kinds of attention are in it."""
RECURRENT = ("delta net", "short convolution", "Mamba")
TEXTS = {0: (3, 14, 15, 9, 26, 5, 35, 8, 9), 1: (53, 58, 9), 2: (7, 9, 3, 2)}


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

    def __init__(self, family: str, device: torch.device, dtype: torch.dtype, seed: int = 2) -> None:
        torch.manual_seed(seed)
        self._device = device
        self.decoder = Decoder(read_architecture(MODELS[family]), Parameters(device, dtype), 64)
        for binding in self.decoder.parameters.bindings:
            torch.nn.init.normal_(binding.destination, std=0.3)
        num_pages = 1 + ROWS * PAGES_PER_ROW
        windows = self.decoder.architecture.windows
        slots = StateSlots(ROWS, checkpoints=ROWS)
        memory = SequenceMemory(self.decoder, dict.fromkeys(windows, num_pages), PAGE_TOKENS, slots, dtype, device)
        self.states = memory.states
        pages = np.arange(1, num_pages, dtype=np.int32).reshape(ROWS, PAGES_PER_ROW)
        pages = np.concatenate((pages, np.zeros((1, PAGES_PER_ROW), np.int32)))  # the last: padding
        self._pages = [pages] * len(windows)
        self._tables = [self._upload(each) for each in self._pages]
        last_tokens = torch.zeros(ROWS + 1, dtype=torch.int64, device=device)
        self.graphs = PromptGraphs(self.decoder, self._tables, last_tokens, (SIZE,), self._capture())

    def _capture(self) -> Capture:
        return CudaCapture() if self._device.type == "cuda" else Again()

    def plan(self, *spans: tuple[int, ...]) -> tuple[StepPlan, StepInputs]:
        """(row, start, end) each, or (row, start, end, tokens before the cut)."""
        rows = []
        for row, start, end, *cuts in spans:
            cut = StateCut(cuts[0], saved_slot(row)) if cuts else None
            rows.append(RowPlan(row, start, RowInputs(end - start, TEXTS[row][start:end]), cut=cut))
        plan = StepPlan(tuple(rows), 0, (), ())
        return plan, StepInputs.of(plan, self._pages, PAGE_TOKENS)

    def eager(self, *spans: tuple[int, ...]) -> Tensor:
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
                PrefillRow(row.row, row.start, row.count, int(offset), *(row.cut or ()))
                for row, offset in zip(plan.rows, inputs.offsets, strict=False)
            ),
            prefill_offsets=self._upload(inputs.offsets.astype(np.int32)),
            prefill_tiles=self._upload(prefill_tiles([row.count for row in plan.rows])),
            prefill_cuts=self._upload(inputs.cuts),
        ).with_groups(others, self._tables[1:])
        return self.decoder(batch)

    def replayed(self, *spans: tuple[int, ...]) -> Tensor:
        plan, inputs = self.plan(*spans)
        assert self.graphs.take(plan, inputs)
        return self.graphs.replay(inputs).clone()

    def _upload(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def saved_slot(row: int) -> int:
    """Where the state of a row is saved."""
    return ROWS + 1 + row


STEPS = (((0, 0, 6, 5), (1, 0, 3)), ((0, 6, 9, 1), (2, 0, 4, 2)))
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
@pytest.mark.parametrize("family", RECURRENT)
def test_saved_state_continues_as_the_step_that_saved_it(
    family: str, device: torch.device, assert_close: AssertClose
) -> None:
    plain, padded = Model(family, device, torch.float32), Model(family, device, torch.float32)
    assert padded.graphs.prepare()
    for run, model in ((plain.eager, plain), (padded.replayed, padded)):
        run(*STEPS[0])
        whole = run(*STEPS[1])
        assert model.states is not None
        model.states.copy([(saved_slot(0), 0), (saved_slot(2), 2)])
        assert_close(run((2, 2, 4)), whole[5:])
        assert_close(run((0, 7, 9)), whole[1:3])


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
    assert not model.graphs.take(*model.plan((0, 0, 9), (1, 0, 3), (2, 0, 4)))  # more tokens than the largest size


class Streams:
    """A runner over a model with random weights, and requests that get their rows one after the other."""

    def __init__(
        self, family: str, device: torch.device, capture: Capture, seed: int, top_logprobs: int | None
    ) -> None:
        self.model = Model(family, device, torch.float32, seed)
        self._sampling = SamplingParams(temperature=0.0, top_logprobs=top_logprobs)
        windows = self.model.decoder.architecture.windows
        num_pages = dict.fromkeys(windows, 1 + ROWS * PAGES_PER_ROW)
        memory = SequenceMemory(
            self.model.decoder, num_pages, PAGE_TOKENS, StateSlots(ROWS), torch.float32, torch.device(device)
        )
        context = PAGE_TOKENS * PAGES_PER_ROW
        self.runner = Runner(self.model.decoder, memory, RunnerConfig(ROWS, context, SIZE), capture=capture)
        self._num_groups = len(windows)
        while self.runner.prepare():
            pass

    def three_steps(self) -> list[RowResult]:
        """What is drawn in a step of two prompts, one of two streams and a prompt, and one of three streams."""

        def prompt(row: int) -> RowPlan:
            return RowPlan(row, 0, RowInputs(len(TEXTS[row]), TEXTS[row]), DRAW_ONE)

        def stream(row: int, num_drawn: int) -> RowPlan:
            return RowPlan(row, len(TEXTS[row]) + num_drawn - 1, LATEST_TOKEN, DRAW_ONE, decodes=True)

        return [
            *self.step(prompt(1), prompt(2), starts=(1, 2)),
            *self.step(stream(2, 1), stream(1, 1), prompt(0), starts=(0,)),
            *self.step(stream(0, 1), stream(1, 2), stream(2, 2)),
        ]

    def step(self, *rows: RowPlan, starts: Sequence[int] = ()) -> list[RowResult]:
        """What the rows draw. `starts`: those that a request gets with this step."""
        pages = [tuple(range(1 + row * PAGES_PER_ROW, 1 + (row + 1) * PAGES_PER_ROW)) for row in starts]
        plan = StepPlan(
            rows,
            sum(row.count == 1 for row in rows),
            tuple((row, EngineRequest(str(row), TEXTS[row], 4, self._sampling), ()) for row in starts),
            tuple(
                (row, group, 0, own)
                for row, own in zip(starts, pages, strict=True)
                for group in range(self._num_groups)
            ),
        )
        draws = [Draw(row.row, 0) for row in rows]
        return self.runner.launch(plan, draws).read()


class Never:
    """A device on which nothing can be captured."""

    def __call__(self, step: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        raise NotCaptured("as the test wants it")


CLEAR = {"cuda": 0.02, "cpu": 0.001}
"""A token that is more likely than the second by this many nats is drawn however sums are rounded."""


def clear_draws(family: str, device: torch.device) -> tuple[int, list[RowResult]]:
    """A seed of weights with which no draw is close, and what is drawn where nothing is captured."""
    for seed in range(20):
        drawn = Streams(family, device, Never(), seed, top_logprobs=2).three_steps()
        tops = [result.logprobs[0].top_logprobs for result in drawn]
        if all(first - second > CLEAR[device.type] for first, second in tops):
            return seed, drawn
    raise AssertionError("all of them have a close draw")


@pytest.mark.parametrize("family", MODELS)
def test_streams_and_a_prompt_in_one_graph_draw_what_single_launches_draw(
    family: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, expected = clear_draws(family, device)
    replays: list[tuple[int, int]] = []
    replay = PromptGraphs.replay

    def counted(graphs: PromptGraphs, inputs: StepInputs, num_singles: int = 0) -> Tensor:
        replays.append((num_singles, len(inputs.tokens) - num_singles))
        return replay(graphs, inputs, num_singles)

    monkeypatch.setattr(PromptGraphs, "replay", counted)
    capture = CudaCapture() if device.type == "cuda" else ReplayOnCpu()
    drawn = Streams(family, device, capture, seed, top_logprobs=None).three_steps()
    assert [result.tokens for result in drawn] == [result.tokens for result in expected]
    assert replays == [(0, 7), (2, 9)]
