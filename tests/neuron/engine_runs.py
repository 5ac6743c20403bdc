"""Random weights of engines, and requests that run until all of them are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import EngineRequest, SamplingParams, StepOutput
from cortex.neuron.layers.parameters import Parameters


def filled(seed: int) -> Callable[[Parameters], None]:
    """Makes what fills a model with random weights."""

    def fill(parameters: Parameters) -> None:
        torch.manual_seed(seed)
        for binding in parameters.bindings:
            view = binding.destination
            view.uniform_(0.1, 1.0) if view.dim() == 1 else view.normal_(0.0, 2 * view.shape[-1] ** -0.5)

    return fill


def run(engine: Engine, *requests: EngineRequest) -> dict[str, list[StepOutput]]:
    """The outputs of each request."""
    outputs: dict[str, list[StepOutput]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    return outputs


def tokens_of(outputs: Sequence[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def responses(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = 10) -> list[list[int]]:
    """The greedy response to each prompt, all in one batch."""
    greedy = SamplingParams(temperature=0.0)
    requests = [EngineRequest(str(number), tuple(prompt), max_tokens, greedy) for number, prompt in enumerate(prompts)]
    return [tokens_of(outputs) for outputs in run(engine, *requests).values()]


def response_to(engine: Engine, request: EngineRequest) -> tuple[list[int], int]:
    """The tokens of a response, and how many of the prompt came from the cache."""
    outputs = run(engine, request)[request.id]
    return tokens_of(outputs), sum(output.cached_tokens or 0 for output in outputs)
