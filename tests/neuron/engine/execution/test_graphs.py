"""When graphs are captured and which steps use them: pure, and with a capture that replays on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from cortex.neuron.engine.active_request import draws_of
from cortex.neuron.engine.execution.graphs import CAPTURE_AFTER_MISSES, MAX_NATIVE_ROWS, SIZES, GraphSizes, SizedGraphs
from cortex.neuron.engine.execution.runner import Runner, RunnerConfig
from cortex.neuron.engine.kv.page_groups import KVPages
from cortex.neuron.engine.memory.plan import StateSlots
from cortex.neuron.engine.memory.sequences import SequenceMemory
from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.engine.scheduling.budget import SchedulerLimits
from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.layers.configs import Shard
from cortex.neuron.layers.parallel import SingleRank
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.families.llama import Llama

from ...tiny_models import tiny_sizes
from ..scheduling.planned_steps import read, token_costs
from .replays import ReplayOnCpu

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "llama",
    **tiny_sizes(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    ),
}
MAX_ROWS = 6
CONTEXT = 48


class Bench:
    """A runner and a scheduler over a tiny model with random weights."""

    def __init__(self, capture: ReplayOnCpu | None, *, checks_drafts: bool = False) -> None:
        torch.manual_seed(0)
        model = Decoder(Llama(CONFIG), Parameters(CPU, torch.float32), CONTEXT)
        for binding in model.parameters.bindings:
            torch.nn.init.normal_(binding.destination, std=0.3)
        memory = SequenceMemory(model, {None: 40}, 8, StateSlots(MAX_ROWS), torch.float32, CPU)
        self._capture = capture
        self.runner = Runner(
            model, memory, RunnerConfig(MAX_ROWS, CONTEXT, 64, checks_drafts=checks_drafts), capture=capture
        )
        self.scheduler = Scheduler(KVPages({None: 40}, 8), SchedulerLimits(MAX_ROWS, 64, 1.0, CONTEXT), token_costs())

    @property
    def capture(self) -> ReplayOnCpu:
        assert self._capture is not None
        return self._capture

    def respond(
        self,
        prompts: list[tuple[int, ...]],
        max_tokens: int,
        temperature: float = 0.0,
        expected: list[list[int]] | None = None,
    ) -> list[list[int]]:
        """`expected`: the responses, of which drafts are made, with every fifth token wrong."""
        sequences = [
            self.scheduler.add(
                EngineRequest(str(number), prompt, max_tokens, SamplingParams(temperature=temperature, seed=number))
            )
            for number, prompt in enumerate(prompts)
        ]
        while True:
            guesses = {}
            for number, sequence in enumerate(sequences if expected is not None else ()):
                done = len(sequence.tokens) - len(sequence.request.prompt)
                right = (expected or [])[number][done : done + 1 + number]
                drafted = tuple(token if (done + place) % 5 else 0 for place, token in enumerate(right))
                guesses[sequence.request.id] = drafted
            if (plan := self.scheduler.plan(guesses)) is None:
                break
            by_row = {sequence.row: sequence for sequence in self.scheduler.running}
            draws = [draw for row in plan.rows if row.outputs.draws for draw in draws_of(by_row[row.row].request, row)]
            launched = self.runner.launch(plan, draws)
            for row, result in zip(plan.rows, launched.read(), strict=True):
                sequence = by_row[row.row]
                read(self.scheduler, sequence, row, result.tokens)
                if not sequence.wants_more:
                    self.scheduler.drop(sequence)
        return [[*sequence.tokens][len(sequence.request.prompt) :] for sequence in sequences]


PROMPTS: list[tuple[int, ...]] = [(3, 1, 4), (1, 5, 9, 2, 6), (5, 3)]


@pytest.mark.parametrize("max_rows", [1, 2, 3, 16, 100, 256, 300])
def test_every_number_of_rows_has_a_size_once_all_are_captured(max_rows: int) -> None:
    sizes = GraphSizes(max_rows)
    order = []
    while (size := sizes.next_missing) is not None:
        sizes.add(size)
        order.append(size)
    assert order == sorted({*(size for size in SIZES if size < max_rows), max_rows})
    for rows in range(1, max_rows + 1):
        assert sizes.serving(rows) == min(size for size in order if size >= rows)
    assert sizes.serving(max_rows + 1) is None


def test_step_uses_the_next_larger_captured_size() -> None:
    sizes = GraphSizes(64)
    assert sizes.serving(1) is None
    sizes.add(1)
    assert [sizes.serving(rows) for rows in (1, 2, 5)] == [1, None, None]
    sizes.add(8)
    assert [sizes.serving(rows) for rows in (1, 2, 5, 9)] == [1, 8, 8, None]
    assert sizes.next_missing == 2


def test_size_is_captured_between_steps_only_after_enough_misses() -> None:
    sizes = GraphSizes(64)
    assert [sizes.missed(3) for _ in range(CAPTURE_AFTER_MISSES)] == [None] * (CAPTURE_AFTER_MISSES - 1) + [4]
    assert sizes.missed(7) is None  # another size: counted separately


def test_captures_nothing_after_giving_up() -> None:
    sizes = GraphSizes(8)
    sizes.add(2)
    sizes.give_up()
    assert sizes.next_missing is None
    assert sizes.serving(2) == 2
    assert [sizes.missed(5) for _ in range(2 * CAPTURE_AFTER_MISSES)] == [None] * (2 * CAPTURE_AFTER_MISSES)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("num_prepared", range(5))
def test_responses_do_not_depend_on_captured_graphs(num_prepared: int, temperature: float) -> None:
    plain = Bench(None).respond(PROMPTS, 12, temperature)
    bench = Bench(ReplayOnCpu())
    assert list(itertools.islice(iter(bench.runner.prepare, False), num_prepared)) == [True] * min(num_prepared, 4)
    assert bench.respond(PROMPTS, 12, temperature) == plain


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_steps_that_check_drafts_have_graphs_and_give_the_same_responses(temperature: float) -> None:
    plain = Bench(None).respond(PROMPTS, 24, temperature)
    assert Bench(None).respond(PROMPTS, 24, temperature, expected=plain) == plain
    bench = Bench(ReplayOnCpu(), checks_drafts=True)
    while bench.runner.prepare():
        pass
    assert bench.runner.max_draft_tokens == MAX_NATIVE_ROWS
    before = bench.capture.replays
    assert bench.respond(PROMPTS, 24, temperature, expected=plain) == plain
    assert 0 < bench.capture.replays - before < 22


def test_graphs_are_captured_one_by_one_smallest_first() -> None:
    bench = Bench(ReplayOnCpu())
    for expected in ([1], [1, 2], [1, 2, 4], [1, 2, 4, 6]):
        assert bench.runner.prepare()
        assert bench.capture.sizes == expected
    assert not bench.runner.prepare()


def test_step_without_a_graph_runs_and_captures_one_only_after_enough_misses() -> None:
    bench = Bench(ReplayOnCpu())
    bench.runner.prepare()
    bench.respond(PROMPTS, CAPTURE_AFTER_MISSES)  # the first token comes from the prompt: one step fewer than tokens
    assert bench.capture.sizes == [1]
    bench.respond(PROMPTS, 3)
    assert bench.capture.sizes == [1, 4]
    assert bench.capture.replays > 0


def test_larger_graph_is_used_while_the_exact_one_is_missing() -> None:
    bench = Bench(ReplayOnCpu())
    for _ in range(2):
        bench.runner.prepare()
    bench.respond(PROMPTS[:1], 4)
    assert bench.capture.replays == 3
    bench.respond(PROMPTS[:2], 4)
    assert bench.capture.replays == 6
    assert bench.capture.sizes == [1, 2]


def test_out_of_memory_ends_capturing_but_no_response() -> None:
    bench = Bench(ReplayOnCpu(room=1))
    assert bench.runner.prepare()
    assert not bench.runner.prepare()
    assert bench.respond(PROMPTS, 2 * CAPTURE_AFTER_MISSES) == Bench(None).respond(PROMPTS, 2 * CAPTURE_AFTER_MISSES)
    assert bench.capture.sizes == [1]
    assert not bench.runner.prepare()


def test_cpu_has_nothing_to_prepare() -> None:
    assert not Bench(None).runner.prepare()


def test_largest_is_captured_second_where_graphs_share_much_memory() -> None:
    sizes, order = GraphSizes(8, (1, 2, 4), largest_second=True), []
    while (size := sizes.next_missing) is not None:
        sizes.add(size)
        order.append(size)
    assert order == [1, 8, 2, 4]
    assert sizes.smallest_missing is None


class TwoRanks(SingleRank):
    """The first of two ranks; the other one says of each question what this one says, or no."""

    shard = Shard(0, 2)

    def __init__(self, *, agrees: bool) -> None:
        self._agrees = agrees

    def all_reduce(self, partial: torch.Tensor) -> torch.Tensor:
        return partial * 2 if self._agrees else partial


class LargeGraphs(SizedGraphs):
    def _room_bytes(self, size: int) -> int:
        return size

    def _inputs(self, size: int) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(size),)

    def _step(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs


@pytest.mark.parametrize("has_room", [True, False])
def test_ranks_capture_large_steps_only_if_all_have_room_for_them(has_room: bool) -> None:
    capture = ReplayOnCpu()
    graphs = LargeGraphs(GraphSizes(2), capture, TwoRanks(agrees=has_room), CPU)
    assert graphs.prepare() == has_room
    assert capture.sizes == ([1] if has_room else [])
    assert (graphs.smallest_missing is not None) == has_room
