"""Ends a model's reasoning at the client's budget, so that an answer still follows.

The engine does not know of budgets. The sequence is cancelled, the model's own end marker is appended to its
reasoning, and a second sequence continues from there; nearly all of its prompt is cached. Where the reasoning is cut
depends on its tokens only, not on how they were batched.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from cortex.neuron.api.backend import Backend, GenerationStream
from cortex.neuron.engine.request import EngineRequest, StepOutput
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.prompt import Rendered
from cortex.wire.requests import GenerateRequest


def submit(
    backend: Backend,
    text: TextModel,
    request: GenerateRequest,
    rendered: Rendered,
    job: EngineRequest,
    response_grammar: str | None,
) -> GenerationStream:
    """Submits `job`, with its reasoning limited if the client set a budget; the output after that has
    `response_grammar`. Raises what `backend.submit` raises."""
    begin = partial(backend.submit, request.model)
    budget_tokens = text.reasoning_budget(request)
    if budget_tokens is None or budget_tokens >= job.max_tokens or not text.may_reason(request):
        return begin(job)
    # The end marker counts as well, and must not exceed the limit.
    budget_tokens = min(budget_tokens, job.max_tokens - len(text.reasoning_end))
    if budget_tokens < 1:
        return begin(job)
    return BudgetedGeneration(begin, text, rendered, job, response_grammar, budget_tokens)


class BudgetedGeneration:
    """One choice's outputs: the reasoning, its forced end if it reached the budget, and the answer."""

    def __init__(
        self,
        begin: Callable[[EngineRequest], GenerationStream],
        text: TextModel,
        rendered: Rendered,
        job: EngineRequest,
        response_grammar: str | None,
        budget_tokens: int,
    ) -> None:
        self._begin = begin
        self._text = text
        self._response_grammar = response_grammar
        self._job = job
        self._budget_tokens = budget_tokens
        self._watch = text.reasoning_watch(rendered)
        self._thought: list[int] = []
        self._running = begin(job)

    def __aiter__(self) -> AsyncIterator[list[StepOutput]]:
        return self._outputs()

    def cancel(self) -> None:
        self._running.cancel()

    async def _outputs(self) -> AsyncGenerator[list[StepOutput], None]:
        async for batch in self._running:
            cut = self._cut(batch)
            yield batch if cut is None else cut
            if cut is not None:
                break
        else:
            return
        self._running.cancel()
        closing = self._text.reasoning_end
        num_left = self._job.max_tokens - len(self._thought) - len(closing)
        yield [StepOutput(self._job.id, closing, finish=None if num_left > 0 else "length")]
        if num_left > 0:
            self._running = self._begin(self._conclusion(closing, num_left))
            async for batch in self._running:
                yield batch

    def _cut(self, batch: list[StepOutput]) -> list[StepOutput] | None:
        """The part of `batch` within the budget; None if all of it is, or if the sequence ends by itself."""
        for number, output in enumerate(batch):
            for place, token in enumerate(output.tokens, start=1):
                if self._watch.is_over:
                    return None
                self._thought.append(token)
                self._watch.push(token)
                ends_here = output.finish is not None and place == len(output.tokens)
                if len(self._thought) >= self._budget_tokens and self._watch.is_thinking and not ends_here:
                    last = replace(output, tokens=output.tokens[:place], logprobs=output.logprobs[:place], finish=None)
                    return [*batch[:number], last]
        return None

    def _conclusion(self, closing: tuple[int, ...], max_tokens: int) -> EngineRequest:
        """The second sequence, which answers."""
        job = self._job
        return replace(
            job,
            id=f"{job.id}.answer",
            prompt=(*job.prompt, *self._thought, *closing),
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, max(0, job.min_tokens - len(self._thought))),
            grammar=self._response_grammar,
        )
