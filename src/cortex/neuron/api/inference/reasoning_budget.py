"""Ends a model's reasoning at the client's budget, so that an answer still follows.

The engine does not know of budgets. The sequence is cancelled, the model's own end marker is appended to its reasoning,
and a second sequence continues from there; nearly all of its prompt is cached. The cut depends on the tokens only, not
on their batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from cortex.neuron.api.backend import Backend, GenerationStream
from cortex.neuron.engine.request import EngineRequest, StepOutput
from cortex.neuron.node.generation import Fail, Receive
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.prompt import Rendered
from cortex.wire.errors import CortexError
from cortex.wire.requests import GenerateRequest


def generate_within_budget(
    backend: Backend,
    text: TextModel,
    request: GenerateRequest,
    rendered: Rendered,
    job: EngineRequest,
    response_grammar: str | None,
) -> GenerationStream:
    """Starts `job`, with its reasoning limited if the client set a budget; the output after that has
    `response_grammar`. Raises what `backend.generate` raises."""
    begin = partial(backend.generate, request.model)
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
        self._reasoning: list[int] = []
        self._is_cut = False
        self._is_paused = False
        self._is_cancelled = False
        self._running = begin(job)
        self._begun = [self._running]

    def follow(self, receive: Receive, fail: Fail) -> None:
        self._running.follow(partial(self._receive_reasoning, receive, fail), partial(self._fail_reasoning, fail))

    def pause(self) -> None:
        self._is_paused = True
        self._running.pause()

    def resume(self) -> None:
        self._is_paused = False
        self._running.resume()

    @property
    def queued_s(self) -> float:
        return sum(each.queued_s for each in self._begun)

    @property
    def energy_j(self) -> float:
        return sum(each.energy_j for each in self._begun)

    def cancel(self) -> None:
        self._is_cancelled = True
        self._running.cancel()

    def _receive_reasoning(self, receive: Receive, fail: Fail, batch: Sequence[StepOutput]) -> None:
        if self._is_cut:  # the end of the cancelled sequence
            return
        cut = self._cut(batch)
        if cut is None:
            receive(batch)
            return
        self._is_cut = True
        self._running.cancel()
        closing = self._text.reasoning_end
        num_left = self._job.max_tokens - len(self._reasoning) - len(closing)
        receive([*cut, StepOutput(self._job.id, closing, finish=None if num_left > 0 else "length")])
        if num_left > 0 and not self._is_cancelled:
            self._answer(receive, fail, self._conclusion(closing, num_left))

    def _answer(self, receive: Receive, fail: Fail, job: EngineRequest) -> None:
        try:
            self._running = self._begin(job)
            self._begun.append(self._running)
        except CortexError as error:
            fail(error)
            return
        if self._is_paused:
            self._running.pause()
        self._running.follow(receive, fail)

    def _fail_reasoning(self, fail: Fail, error: CortexError) -> None:
        if not self._is_cut:
            fail(error)

    def _cut(self, batch: Sequence[StepOutput]) -> list[StepOutput] | None:
        """The part of `batch` within the budget; None if all of it is, or if the sequence ends by itself."""
        for number, output in enumerate(batch):
            for place, token in enumerate(output.tokens, start=1):
                if self._watch.is_over:
                    return None
                self._reasoning.append(token)
                self._watch.push(token)
                ends_here = output.finish is not None and place == len(output.tokens)
                if len(self._reasoning) >= self._budget_tokens and self._watch.is_thinking and not ends_here:
                    last = output._replace(tokens=output.tokens[:place], logprobs=output.logprobs[:place], finish=None)
                    return [*batch[:number], last]
        return None

    def _conclusion(self, closing: tuple[int, ...], max_tokens: int) -> EngineRequest:
        """The second sequence, which answers."""
        job = self._job
        return replace(
            job,
            id=f"{job.id}.answer",
            prompt=(*job.prompt, *self._reasoning, *closing),
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, max(0, job.min_tokens - len(self._reasoning))),
            grammar=self._response_grammar,
        )
