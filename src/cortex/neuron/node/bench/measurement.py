"""One measurement of a model on this node: streams, prompts, wake and load, compared with the limits of the devices."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial

import cortex
from cortex.neuron.config import NeuronConfig
from cortex.neuron.engine.request import EngineRequest, SamplingParams, StepOutput
from cortex.neuron.node.bench.workload import (
    DECODE_PROMPT_TOKENS,
    PROBE_TOKENS,
    ModelCapacity,
    ReplicaLimits,
    Workload,
    mean_tokens,
    steady_rate,
)
from cortex.neuron.node.controller import ModelController
from cortex.neuron.node.devices import NodeDevices
from cortex.neuron.node.instance import Instance
from cortex.neuron.worker.process import WorkerLost
from cortex.wire.errors import CortexError, LoadFailed
from cortex.wire.node.bench import BenchResult, StreamRate
from cortex.wire.node.protocol import ModelState
from cortex.wire.words import plural

PRINCIPAL = "cortex-bench"
_GREEDY = SamplingParams(temperature=0.0)


class StreamSet:
    """Requests that start together. Prompts are random and so never cached, responses never end early, and no tokens
    are drafted, so that the work depends on the sizes alone. Their KV is not kept, because it would evict conversations
    from the cache. They are therefore computed like other requests, except that no recurrent states are saved and that
    no chunk of a prompt ends at a checkpoint."""

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


WARM_UP_TOKENS = 4


class Measurement:
    """Runs once. Belongs to the daemon's loop."""

    def __init__(
        self,
        controller: ModelController,
        devices: NodeDevices,
        config: NeuronConfig,
        workload: Workload,
        *,
        can_sleep: bool,
        on_stage: Callable[[str], None],
    ) -> None:
        self._controller = controller
        self._devices = devices
        self._config = config
        self._workload = workload
        self._can_sleep = can_sleep
        self._on_stage = on_stage
        self._notes: list[str] = []

    async def run(self, *, reload: bool) -> BenchResult:
        """Raises CortexError. The model is ready at the end, or a note says why it could not be loaded again.
        A cancelled run may leave it out of memory."""
        before = await self._limits()
        counts = self._workload.streams
        rates = [(count, *rate) for count in counts if (rate := await self._streams(count)) is not None]
        prompt_tokens, prompt_rate = await self._prompt()
        after = await self._limits() if before is not None else None
        # Other programs may have slowed down one of the two.
        limits = before.or_faster(after) if before is not None and after is not None else None
        wake_s, load_s = await self._reloads() if reload else (None, None)
        return BenchResult(
            measured_at=time.time(),
            version=cortex.__version__,
            streams=tuple(
                StreamRate(
                    streams=count,
                    tokens_per_s=round(rate, 1),
                    share=round(limits.decode_share(count, rate, tokens=tokens), 4) if limits is not None else None,
                )
                for count, rate, tokens in rates
            ),
            prompt_tokens=prompt_tokens,
            prompt_tokens_per_s=round(prompt_rate, 1),
            prompt_share=round(limits.prompt_share(prompt_tokens, prompt_rate), 4) if limits and prompt_rate else None,
            wake_s=wake_s,
            load_s=load_s,
            bytes_per_s=round(limits.devices.bytes_per_s) if limits is not None else None,
            flops=round(limits.devices.flops) if limits is not None else None,
            host_bytes_per_s=round(limits.devices.host_bytes_per_s) or None if limits is not None else None,
            bus_bytes_per_s=round(limits.devices.bus_bytes_per_s) or None if limits is not None else None,
            notes=tuple(dict.fromkeys(self._notes)),
        )

    def _instance(self) -> Instance:
        return self._controller.serving_instance()

    async def _limits(self) -> ReplicaLimits | None:
        """None, with a note, if shares of the limits are unknown."""
        self._on_stage("limits of the device")
        instance = self._instance()
        model, work = self._controller.model, instance.resident.info.work
        if work is None:
            self._notes.append("no shares: what this model reads and computes is not known")
            return None
        measured = []
        for index in instance.host.replica_devices[0]:
            try:
                limits = await self._devices.supervisors[index].limits()
            except WorkerLost as lost:
                raise LoadFailed(f"{model.id} lost its device: {lost}; try again") from lost
            if limits is None:
                self._notes.append("no shares: there is not enough memory left on the device to measure its limits")
                return None
            measured.append(limits)
        replicas = len(instance.host.replica_devices)
        return ReplicaLimits.of(work, measured, replicas=replicas, is_staged=model.pipeline_parallel > 1)

    async def _streams(self, count: int) -> tuple[float, float] | None:
        """The total tokens per second of `count` concurrent streams, and the mean number of tokens of each. None, with
        a note, if they cannot run concurrently here."""
        instance = self._instance()
        named = plural(count, "stream")
        self._on_stage(named)
        tokens = self._room(instance).decode_tokens(count)
        if not tokens:
            self._notes.append(f"{named}: they do not fit into its slots and its KV cache together")
            return None
        workload = self._workload
        await self._ran(StreamSet(instance, count, DECODE_PROMPT_TOKENS, WARM_UP_TOKENS), workload.warm_up_s, count)
        measured = await self._ran(StreamSet(instance, count, DECODE_PROMPT_TOKENS, tokens), workload.streams_s, count)
        rate = steady_rate(measured.arrivals)
        if rate is None:
            self._notes.append(f"{named}: not all of them had begun after {workload.streams_s:.0f} s")
            return None
        return rate, mean_tokens(measured.arrivals)

    async def _prompt(self) -> tuple[int, float]:
        """The length of the longest measured prompt, and its tokens per second; 0 if none ended in time."""
        self._on_stage("prompt")
        room = self._room(self._instance())
        tokens = room.prompt_tokens(0.0)
        await self._prompt_s(tokens)  # the first one may compile
        probe_s = await self._prompt_s(tokens)
        if probe_s is None:
            self._notes.append(f"prompt: {PROBE_TOKENS} tokens take more than {self._workload.prompt_s:.0f} s")
            return 0, 0.0
        longer = room.prompt_tokens(tokens / probe_s)
        times = [await self._prompt_s(longer) for _ in range(self._workload.prompt_repeats)]
        known = [seconds for seconds in times if seconds is not None]
        return (longer, longer / min(known)) if known else (tokens, tokens / probe_s)

    async def _prompt_s(self, tokens: int) -> float | None:
        """Seconds to the first token."""
        streams = await self._ran(StreamSet(self._instance(), 1, tokens, 1), self._workload.prompt_s, 1)
        return streams.arrivals[0][0][0] - streams.begun_s if streams.arrivals[0] else None

    async def _ran(self, streams: StreamSet, within_s: float, count: int) -> StreamSet:
        others = self._num_requests() - count
        await streams.ended(within_s)
        if max(others, self._num_requests()) > 0:
            self._notes.append("other requests ran on the model meanwhile, so it is faster than this")
        return streams

    async def _reloads(self) -> tuple[float | None, float | None]:
        """Seconds of a wake and of a load; requests that come meanwhile wait for them."""
        controller = self._controller
        if self._num_requests():
            self._notes.append("load and wake: not measured, because it has requests")
            return None, None
        drain_s = self._config.drain_s
        wake_s = None
        try:
            if self._can_sleep:
                self._on_stage("wake")
                await controller.ensure_asleep(drain_s)
                if controller.life.state is ModelState.ASLEEP:
                    wake_s = await self._ready_s()
                else:
                    self._notes.append("wake: there is no room in host memory for its weights")
                    await self._ready_s()
            self._on_stage("load")
            await controller.ensure_gone(drain_s)
            return wake_s, await self._ready_s()
        except CortexError as error:
            self._notes.append(f"it could not be loaded again, and is tried once more: {error.message}")
            controller.want_ready(controller.model)
            return wake_s, None

    async def _ready_s(self) -> float:
        begun_s = time.perf_counter()
        await self._controller.ensure_ready(self._controller.model)
        return round(time.perf_counter() - begun_s, 3)

    def _num_requests(self) -> int:
        return self._instance().num_requests

    def _room(self, instance: Instance) -> ModelCapacity:
        info, limits = instance.resident.info, self._config.limits
        used = instance.stats.used_pages * info.page_tokens if self._num_requests() else 0
        return ModelCapacity(
            self._workload,
            context_tokens=info.context_tokens,
            max_prompt_tokens=limits.max_prompt_tokens,
            slots=limits.max_num_seqs * len(instance.host.replica_devices),
            cache_tokens=info.num_pages * info.page_tokens - used,
        )
