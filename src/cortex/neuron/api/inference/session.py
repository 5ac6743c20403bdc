"""One request from the load of its model to the last event of its response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

from cortex.neuron.api.backend import Backend, GenerationStream
from cortex.neuron.api.drain_gate import DrainGate
from cortex.neuron.api.inference.choice import Choice, ChoiceContext
from cortex.neuron.api.inference.engine_requests import check_num_scores, engine_requests, scores_prompt, within_limit
from cortex.neuron.api.inference.tasks import check_task
from cortex.neuron.api.inference.thought_budget import generate_within_budget
from cortex.neuron.engine.request import EngineRequest, StepOutput
from cortex.neuron.node.status import ServedModel
from cortex.wire.errors import CortexError
from cortex.wire.events import AnyEvent, Timing, Usage
from cortex.wire.node.protocol import LoadRequest, ModelState
from cortex.wire.packed_request import PackedRequest
from cortex.wire.response import summed

Phase = Literal["load", "render", "prefill", "decode"]


class Session:
    """Owned by one request's task. However it ends, every sequence that it started has ended or is cancelled."""

    def __init__(
        self,
        backend: Backend,
        drain_gate: DrainGate,
        packed: PackedRequest,
        *,
        id: str,
        created: int,
        principal: str,
        token_limit: int | None = None,
    ) -> None:
        """`token_limit`: the most tokens of prompts and choices together."""
        self.phase: Phase = "load"
        """The current phase; after the end, the last one."""
        self._backend = backend
        self._drain_gate = drain_gate
        self._packed = packed
        self._id = id
        self._created = created
        self._principal = principal
        self._token_limit = token_limit
        self._choices: list[Choice] = []

    @property
    def usage(self) -> Usage:
        """Usage of all choices so far."""
        return summed(choice.usage for choice in self._choices)

    async def events(self) -> AsyncGenerator[list[AnyEvent], None]:
        """Batches of events. Raises a `CortexError` when the response cannot start or continue."""
        arrived_s = time.monotonic()
        request = self._packed.head
        served = await self._drain_gate.wait_for(ready(self._backend, request.model))
        check_task(self._backend, request.model, served, "chat")
        self.phase = "render"
        text = await self._drain_gate.wait_for(self._backend.texts.text(request.model))
        preparing = self._backend.texts.prepare(self._packed, principal=self._principal)
        prepared = await self._drain_gate.wait_for(preparing)
        num_prompt_tokens = sum(len(rendered.ids) for rendered in prepared.prompts)
        check_num_scores(request, num_prompt_tokens)
        if self._token_limit is not None:
            request = within_limit(request, num_prompt_tokens, self._token_limit)
        self.phase = "prefill"
        jobs: list[EngineRequest] = []
        choices = self._choices
        for single, rendered in zip(request.one_per_prompt, prepared.prompts, strict=True):
            continuations = engine_requests(
                single,
                id=self._id,
                first_index=len(jobs),
                prompt=rendered.ids,
                context_tokens=served.context_tokens or len(rendered.ids) + 1,
                defaults=served.sampling.over(text.generation),
                eos_ids=text.eos_ids,
                turn_ends=rendered.turn_ends,
                grammar=prepared.grammar,
                principal=self._principal,
            )
            stops = continuations[0].stop_token_ids
            context = ChoiceContext(self._id, self._created, request.model, single, rendered, text, stops)
            choices += [Choice(context, len(jobs) + number) for number in range(len(continuations))]
            jobs += continuations
        if request.sampling.max_tokens == 0 and not scores_prompt(request):
            yield [event for choice in choices for event in choice.echo()]
            return
        generations: list[GenerationStream] = []
        submitted_s = time.monotonic()
        first_s: float | None = None
        try:
            for choice, job in zip(choices, jobs, strict=True):
                generations.append(
                    generate_within_budget(
                        self._backend, text, request, choice.rendered, job, prepared.response_grammar
                    )
                )
            async with aclosing(_merged(generations)) as outputs:
                async for index, batch in outputs:
                    now_s = time.monotonic()
                    first_s = first_s or now_s
                    self.phase = "decode"
                    timing = Timing(
                        queue_s=submitted_s - arrived_s, prefill_s=first_s - submitted_s, decode_s=now_s - first_s
                    )
                    choice = choices[index]
                    if events := choice.push(batch, timing):
                        yield events
                    if choice.ended:
                        generations[index].cancel()
                        if all(choice.ended for choice in choices):
                            return
            raise CortexError("The engine stopped before the response was complete; try again.")
        finally:
            for generation in generations:
                generation.cancel()


async def ready(backend: Backend, model_id: str) -> ServedModel:
    """The model once it is loaded. A recovering model is returned as is: `generate` raises when to retry."""
    served = backend.served(model_id)
    if served.state in (ModelState.READY, ModelState.RECOVERING):
        return served
    await backend.load(LoadRequest(model_id=model_id), wait=True)
    return backend.served(model_id)


async def _merged(generations: Sequence[GenerationStream]) -> AsyncGenerator[tuple[int, list[StepOutput]], None]:
    """The outputs of all choices in order of arrival, each with its choice's index."""
    if len(generations) == 1:
        async for batch in generations[0]:
            yield 0, batch
        return
    arrived: asyncio.Queue[tuple[int, list[StepOutput]] | Exception | None] = asyncio.Queue()

    async def pump(index: int, generation: GenerationStream) -> None:
        try:
            async for batch in generation:
                arrived.put_nowait((index, batch))
        except CortexError as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    pumps = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(generations)]
    try:
        running = len(pumps)
        while running:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
