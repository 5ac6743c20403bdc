"""Runs requests on an engine until all of them are done."""

from __future__ import annotations

from collections.abc import Sequence

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import EngineRequest, SamplingParams, StepOutput


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
