"""Concurrent requests to a loaded model, with the time of each of their tokens."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from functools import partial

from cortex.neuron.engine.request import EngineRequest, SamplingParams, StepOutput
from cortex.neuron.node.instance import Instance
from cortex.wire.errors import CortexError

PRINCIPAL = "cortex-bench"
_GREEDY = SamplingParams(temperature=0.0)


class StreamSet:
    """Requests that start together. Prompts are random, so that nothing of them is cached; nothing ends a response
    early, and no token is drafted: the work depends on the sizes alone. Nothing of them is kept: it would push
    conversations out of the cache. They are therefore computed like other requests, except that no recurrent states are
    saved and that no chunk of a prompt ends at a checkpoint."""

    def __init__(self, instance: Instance, num_streams: int, prompt_tokens: int, max_tokens: int) -> None:
        """Raises CortexError, and then nothing runs."""
        self.arrivals: list[list[tuple[float, int]]] = [[] for _ in range(num_streams)]
        """When tokens of each stream came: (seconds, how many)."""
        self._ended = asyncio.get_running_loop().create_future()
        self._num_running = num_streams
        vocab_size = instance.resident.info.vocab_size
        self.begun_s = time.perf_counter()
        self._generations = []
        try:
            for number in range(num_streams):
                request = EngineRequest(
                    id=f"bench-{secrets.token_hex(8)}",
                    prompt=tuple(random.choices(range(vocab_size), k=prompt_tokens)),
                    max_tokens=max_tokens,
                    sampling=_GREEDY,
                    principal=PRINCIPAL,
                    speculates=False,
                    uses_prefix_cache=False,
                )
                generation = instance.generate(request)
                self._generations.append(generation)
                generation.follow(partial(self._received, number), self._failed)
        except CortexError:
            self.cancel()
            raise

    def cancel(self) -> None:
        for generation in self._generations:
            generation.cancel()

    async def ended(self, within_s: float) -> None:
        """Returns when all have ended, or are cancelled after `within_s`. Raises CortexError when one failed."""
        try:
            await asyncio.wait_for(asyncio.shield(self._ended), within_s)
        except TimeoutError:
            self.cancel()
            await self._ended
        except BaseException:
            self.cancel()
            raise

    def _received(self, number: int, outputs: Sequence[StepOutput]) -> None:
        now_s = time.perf_counter()
        for output in outputs:
            if output.tokens:
                self.arrivals[number].append((now_s, len(output.tokens)))
            if output.finish is not None:
                self._num_running -= 1
        if not self._num_running and not self._ended.done():
            self._ended.set_result(None)

    def _failed(self, error: CortexError) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # marks it as retrieved: the caller may be cancelled
