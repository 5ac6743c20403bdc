"""Draws of decode steps whose graphs cannot be captured; `tests/neuron/kernels` has those that can."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cortex.neuron.engine.execution.draw_graphs import DrawGraphs
from cortex.neuron.engine.execution.graphs import CAPTURE_AFTER_MISSES, NotCaptured, Outputs

from .replays import ReplayOnCpu
from .test_graphs import PROMPTS, Bench

MODULE = "cortex.neuron.engine.execution.draw_graphs.CudaCapture"
MAX_TOKENS = CAPTURE_AFTER_MISSES + 8


def responses(bench: Bench) -> list[list[int]]:
    """Sampled with a seed each, with a graph for each step of streams."""
    while bench.runner.prepare():
        pass
    return bench.respond(PROMPTS, MAX_TOKENS, temperature=1.5)


def with_draw_graphs() -> tuple[Bench, DrawGraphs]:
    """As on a GPU."""
    bench = Bench(ReplayOnCpu())
    runner = bench.runner
    graphs = runner._draw_graphs = DrawGraphs(runner.sampler, runner._last_tokens)  # noqa: SLF001
    return bench, graphs


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return responses(Bench(None))


@pytest.mark.parametrize("error", [NotCaptured("no"), torch.OutOfMemoryError("no room")], ids=["no graph", "no room"])
@pytest.mark.parametrize("is_idle", [True, False], ids=["while idle", "between steps"])
def test_draw_that_cannot_be_captured_runs_without_a_graph(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, error: Exception, is_idle: bool
) -> None:
    attempts = 0

    class Failing:
        def __call__(self, step: Callable[[], Outputs]) -> None:
            nonlocal attempts
            attempts += 1
            del step
            raise error

    monkeypatch.setattr(MODULE, Failing)
    bench, graphs = with_draw_graphs()
    if not is_idle:
        monkeypatch.setattr(graphs, "prepare", lambda _: False)
    assert responses(bench) == expected
    assert attempts == 1, "one failure is enough to know"
    steps = bench.runner._graphs.steps  # noqa: SLF001
    assert steps is not None
    assert not DrawGraphs.prepare(graphs, steps)
