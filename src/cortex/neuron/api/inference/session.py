"""One request from the load of its model to the last event of its response.

Reasoning ends at the client's budget, so that an answer still follows. The engine does not know of budgets. The
sequence is cancelled, the model's own end marker is appended to its reasoning, and a second sequence continues from
there; nearly all of its prompt is cached. The cut depends on the tokens only, not on their batches.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import msgspec

from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.inference.choice import Choice, ChoiceContext, Stopwatch
from cortex.neuron.api.inference.engine_requests import check_num_scores, engine_requests, within_limit
from cortex.neuron.api.inference.tasks import check_task
from cortex.neuron.engine.request import EngineRequest, StepOutput
from cortex.neuron.node.generation import Fail, Generation, Receive
from cortex.neuron.node.node import Node
from cortex.neuron.node.status import ServedModel
from cortex.neuron.picture_process.client import PictureWork
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.template.prompt import Rendered
from cortex.wire.errors import CortexError, prompt_too_long
from cortex.wire.events import AnyEvent, Finish, Start, Timing, Usage
from cortex.wire.fields.body import LARGEST_COUNT
from cortex.wire.node.neighbours import Neighbour
from cortex.wire.node.orders import LoadRequest
from cortex.wire.node.protocol import ModelState
from cortex.wire.packed_request import PackedRequest
from cortex.wire.requests import GenerateRequest
from cortex.wire.response import summed

Phase = Literal["load", "render", "prefill", "decode"]
Deliver = Callable[[list[AnyEvent]], None]
"""Takes a batch of events of the response."""


def generate_within_budget(
    backend: Node,
    text: TextModel,
    request: GenerateRequest,
    rendered: Rendered,
    job: EngineRequest,
    response_grammar: str | None,
) -> Generation | BudgetedGeneration:
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
        begin: Callable[[EngineRequest], Generation],
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


class Session:
    """Owned by one request's task. However it ends, every sequence that it started has ended or is cancelled."""

    def __init__(
        self,
        backend: Node,
        drain_gate: DrainGate,
        packed: PackedRequest,
        *,
        id: str,
        created: int,
        principal: str,
        client: str,
        token_limit: int | None = None,
        gateway_s: float = 0.0,
        kv_source: Neighbour | None = None,
    ) -> None:
        """`client`: the unit of fairness for decoding pictures. `token_limit`: for prompts and choices together.
        `gateway_s`: how long a gateway held the request back. `kv_source`: a node that has computed more of the prompt.
        """
        self.phase: Phase = "load"
        """The current phase; after the end, the last one."""
        self._backend = backend
        self._drain_gate = drain_gate
        self._packed = packed
        self._id = id
        self._created = created
        self._principal = principal
        self._token_limit = token_limit
        self._gateway_s = gateway_s
        self._kv_source = kv_source
        self.first_token_s: float | None = None
        """Time from the request's arrival to its first token."""
        self._at_end = (0, 0)
        """Measurements of its choices after their end."""
        self._arrived_s = time.monotonic()
        self._picture_work = PictureWork(client)
        self._choices: list[Choice] = []
        self._generations: list[Generation | BudgetedGeneration] = []
        self._stopwatch: Stopwatch
        self._ended: asyncio.Future[None] | None = None
        """Set while outputs are awaited."""
        self._fetching: asyncio.Task[None] | None = None
        """KV that arrives while its prompt is computed."""

    @property
    def usage(self) -> Usage:
        """Usage of all choices so far; before there are any, the pictures that were decoded for them."""
        if not self._choices:
            return Usage(prompt_tokens=self._picture_work.num_tokens)
        used = summed(choice.usage for choice in self._choices)
        queued_ms, energy_mj = self._measured() if self._generations else self._at_end
        return msgspec.structs.replace(used, queued_ms=queued_ms, energy_mj=energy_mj)

    def _measured(self) -> tuple[int, int]:
        """How long its choices waited for slots, and their energy, in thousandths."""
        begun = self._generations
        return round(1000 * sum(each.queued_s for each in begun)), round(1000 * sum(each.energy_j for each in begun))

    async def run(self, deliver: Deliver) -> None:
        """Calls `deliver` with batches of events, to the last one. Raises a `CortexError` when the response cannot
        start or continue, and what `deliver` raises."""
        arrived_s = time.monotonic()
        request = self._packed.head
        if not request.unloads_only:
            served = await self._drain_gate.wait_for(
                ready(self._backend, request.model, is_of_gateway=bool(self._principal))
            )
        if request.loads_only:
            deliver(
                [
                    Start(id=self._id, model=request.model, created=self._created),
                    Finish(reason="stop", usage=Usage(), timing=Timing(gateway_s=self._gateway_s)),
                ]
            )
            return
        check_task(self._backend, request.model, served, "chat", is_of_gateway=bool(self._principal))
        self.phase = "render"
        text = await self._drain_gate.wait_for(self._backend.texts.text(request.model))
        preparing = self._backend.texts.prepare(self._packed, principal=self._principal)
        prepared = await self._drain_gate.wait_for(preparing)
        num_prompt_tokens = sum(len(rendered.ids) for rendered in prepared.prompts)
        check_num_scores(request, num_prompt_tokens)
        if (cap := request.most_context_tokens) is not None and num_prompt_tokens >= cap:
            raise prompt_too_long(num_prompt_tokens, cap)
        if self._token_limit is not None:
            request = within_limit(request, num_prompt_tokens, self._token_limit)
        decode, work = self._backend.pictures.prepare, self._picture_work
        pictures = [
            await self._drain_gate.wait_for(decode(self._packed, text.pictures, rendered.places, work))
            if text.pictures is not None and rendered.places
            else ()
            for rendered in prepared.prompts
        ]
        self.phase = "prefill"
        jobs: list[EngineRequest] = []
        choices = self._choices
        for single, rendered, shown_pictures in zip(request.one_per_prompt, prepared.prompts, pictures, strict=True):
            continuations = engine_requests(
                single,
                id=self._id,
                first_index=len(jobs),
                prompt=rendered.ids,
                context_tokens=min(
                    served.context_tokens or len(rendered.ids) + 1, request.most_context_tokens or LARGEST_COUNT
                ),
                defaults=served.sampling.over(text.generation),
                eos_ids=text.eos_ids,
                turn_ends=rendered.turn_ends,
                grammar=prepared.grammar,
                prediction=prepared.prediction,
                pictures=shown_pictures,
                principal=self._principal,
            )
            stops, num_predicted = continuations[0].stop_token_ids, len(prepared.prediction)
            shown = (self._id, self._created, request.model)
            context = ChoiceContext(*shown, single, rendered, text, stops, num_predicted)
            choices += [Choice(context, len(jobs) + number) for number in range(len(continuations))]
            jobs += continuations
        ended = self._ended = asyncio.get_running_loop().create_future()
        try:
            if self._kv_source is not None:
                computes_fronts = self._backend.computes_fronts(request.model)
                fetching = self._backend.fetch_kv(request.model, jobs[0], self._kv_source)
                if computes_fronts:
                    self._fetching = asyncio.create_task(fetching)
                    await asyncio.sleep(0)  # workers expect its blocks before they get its requests
                    jobs = [replace(job, transfer=jobs[0].id) for job in jobs]
                else:
                    await self._drain_gate.wait_for(fetching)
            self._stopwatch = Stopwatch(arrived_s, submitted_s=time.monotonic(), gateway_s=self._gateway_s)
            for choice, job in zip(choices, jobs, strict=True):
                generation = generate_within_budget(
                    self._backend, text, request, choice.rendered, job, prepared.response_grammar
                )
                self._generations.append(generation)
                generation.follow(partial(self._receive, deliver, choice, generation), self._fail)
            await ended
        finally:
            self._ended = None
            self._end_fetching()
            for generation in self._generations:
                generation.cancel()
            self._at_end = self._measured()
            self._generations.clear()

    def _end_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()

    def pause(self) -> None:
        """Deliver nothing until `resume`, because the client reads too slowly."""
        for generation in self._generations:
            generation.pause()

    def resume(self) -> None:
        for generation in list(self._generations):
            generation.resume()

    def _receive(
        self,
        deliver: Deliver,
        choice: Choice,
        generation: Generation | BudgetedGeneration,
        outputs: Sequence[StepOutput],
    ) -> None:
        """Never raises, because a fault of one response must not end the others."""
        if self._ended is None or self._ended.done():
            return
        self.phase = "decode"
        if self.first_token_s is None:
            self._end_fetching()
            self.first_token_s = time.monotonic() - self._arrived_s
        try:
            if events := choice.push(outputs, self._stopwatch):
                deliver(events)
        except Exception as problem:  # noqa: BLE001 - `run` raises it
            self._fail(problem)
            return
        if choice.ended:
            generation.cancel()
            if all(each.ended for each in self._choices):
                self._ended.set_result(None)

    def _fail(self, problem: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(problem.with_traceback(None))  # several generations may share one error


async def ready(backend: Node, model_id: str, *, is_of_gateway: bool) -> ServedModel:
    """The model once it is loaded. A recovering model is returned as is, because `generate` raises with the retry
    delay. A load for a gateway's request evicts nothing, because the gateway decides which models are unloaded."""
    served = backend.served(model_id)
    if served.state in (ModelState.READY, ModelState.RECOVERING):
        return served
    least_tokens = 1 if is_of_gateway else None
    await backend.load(LoadRequest(model_id=model_id, min_context_tokens=least_tokens), wait=True)
    return backend.served(model_id)
