"""An engine whose device is a clock: the real scheduler and step loop, and steps that take the time of a GPU.

    PYTHONPATH=src:bench python bench/modelled_device.py

simulates Poisson arrivals, and prints what a client would see, for each bound of a step given with `--step-ms`. Its
clock is virtual: the result depends on the scheduler alone. A node (`bench/node_http.py`) runs the engine in real time.

A launched step ends a modelled time after the one before it. The host's part of a launch is work: for a step that is
not captured, hundreds of short calls that release the interpreter lock, as launches of kernels do.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from cortex.neuron.engine.execution.graphs import CaptureCosts
from cortex.neuron.engine.execution.prompt_graphs import MAX_PROMPTS, PROMPT_SIZES, STREAM_SIZES, mixed_sizes
from cortex.neuron.engine.execution.results import NO_RESULT, RowResult
from cortex.neuron.engine.kv.page_groups import KVPages
from cortex.neuron.engine.request import Counters, EngineRequest, SamplingParams
from cortex.neuron.engine.roofline.step_costs import StepCosts
from cortex.neuron.engine.roofline.step_work import DeviceLimits, StepWork
from cortex.neuron.engine.scheduling.budget import SchedulerLimits
from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.engine.scheduling.step_plan import RowPlan, StepPlan
from cortex.neuron.engine.speculation.speculation import Speculation
from cortex.neuron.engine.speculation.width_rule import FastestWidths
from cortex.neuron.engine.step_loop import StepLoop
from scripted_engine import CONTEXT_TOKENS, FIRST_WORD, PAGE_TOKENS, VOCAB, engine_info
from workloads import arriving_requests, percentile

SLOWDOWN = "MODELLED_SLOWDOWN"
"""The environment variable with the factor by which steps take longer than on the device: this host has fewer cores."""
WORK = StepWork(15_000_000_000, token_bytes=131_072, weights_per_token=7_500_000_000, attention_width=131_072)
"""Llama 3.1 8B in bfloat16."""
STREAMS_MS = {1: 3.8, 16: 4.1, 48: 5.0, 64: 5.0, 256: 9.3, 512: 15.0}
"""Steps of streams with short contexts, measured on an H200."""
CONTEXT_MS = 3.2e-5
"""For each token before a stream's."""
MIXED_MS = {
    16: {16: 5.5, 64: 6.1, 128: 6.6, 256: 8.7, 512: 13.0, 1024: 21.7},
    48: {16: 7.1, 64: 7.4, 128: 8.5, 256: 10.3, 512: 15.8, 1024: 25.5},
}
"""Graphs of streams and tokens of prompts, by both."""
PROMPT_MS, FREE_TOKENS, EAGER_MS = 0.0245, 150, 0.0225
"""A token of a prompt without streams after the first ones, which reading the weights hides, and one with streams in a
step that is not captured."""
HOST_MS = {"streams": 1.5, "graph": 4.0, "eager": 35.0}
"""What the host takes to plan and launch a step."""
MAX_ROWS = 512
NUM_PAGES = 50_000
STEP_TOKENS, STEP_S, RESERVED_TOKENS = 16_384, 0.05, 512
EAGER_LAUNCHES = 900
"""They take 25 ms on two cores at 2.5 GHz, as on the host of the GPU."""

_memset = ctypes.CDLL(None).memset  # releases the lock
_scratch = ctypes.create_string_buffer(1 << 18)


class StepMs(NamedTuple):
    device: float
    host: float


def step_ms(rows: Sequence[RowPlan]) -> StepMs:
    """What a step takes on the device, and to launch."""
    streams = [row for row in rows if row.decodes]
    prompts = [row.count for row in rows if not row.decodes]
    num_streams, tokens = len(streams), sum(prompts)
    context_ms = CONTEXT_MS * sum([row.start for row in streams])
    if not prompts:
        return StepMs(_between(STREAMS_MS, num_streams) + context_ms, HOST_MS["streams"])
    is_small = len(prompts) <= MAX_PROMPTS and num_streams <= STREAM_SIZES[-1]
    graph_streams = next((each for each in STREAM_SIZES if each >= num_streams), STREAM_SIZES[-1])
    sizes = mixed_sizes(graph_streams) if num_streams else PROMPT_SIZES
    host_ms, size = HOST_MS["eager"], tokens
    if is_small and tokens <= sizes[-1]:
        host_ms, size = HOST_MS["graph"], sizes[bisect_left(sizes, tokens)]
    if not num_streams:
        return StepMs(STREAMS_MS[1] + PROMPT_MS * max(0, size - FREE_TOKENS), host_ms)
    if host_ms == HOST_MS["eager"]:
        return StepMs(_between(STREAMS_MS, num_streams) + EAGER_MS * tokens + context_ms, host_ms)
    by_streams = {count: _between(times, size) for count, times in MIXED_MS.items()}
    more_ms = 1.2 * max(0.0, _between(STREAMS_MS, num_streams) - STREAMS_MS[48])
    return StepMs(_between(by_streams, min(48, num_streams)) + more_ms + context_ms, host_ms)


def _between(table: Mapping[int, float], place: float) -> float:
    """Linear between the entries, and constant outside."""
    known = sorted(table)
    if place <= known[0]:
        return table[known[0]]
    for low, high in pairwise(known):
        if place <= high:
            return table[low] + (table[high] - table[low]) * (place - low) / (high - low)
    return table[known[-1]]


class VirtualClock:
    """Time that passes when a step is launched or waited for."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def work(self, step: StepMs) -> None:
        self.now_s += step.host / 1e3

    def wait_until(self, then_s: float) -> None:
        self.now_s = max(self.now_s, then_s)


class RealClock:
    """Time that passes anyway; launches of kernels take it."""

    def __call__(self) -> float:
        return time.monotonic()

    def work(self, step: StepMs) -> None:
        for _ in range(EAGER_LAUNCHES if step.host == HOST_MS["eager"] else 0):
            _memset(_scratch, 0, len(_scratch))
            for _ in range(1000):
                pass

    def wait_until(self, then_s: float) -> None:
        time.sleep(max(0.0, then_s - time.monotonic()))


Clock = VirtualClock | RealClock


class ModelledStep:
    """A step on the device, as `Launched` is one."""

    def __init__(self, rows: Sequence[RowPlan], wait: Callable[[], None], token: int) -> None:
        self._rows = rows
        self._wait = wait
        self._result = RowResult((token,))

    def read(self) -> list[RowResult]:
        self._wait()
        return [self._result if row.outputs.draws else NO_RESULT for row in self._rows]


class ModelledRunner:
    """What a step loop needs of a `Runner`."""

    model = SimpleNamespace(config=SimpleNamespace(vocab=VOCAB))
    pictures = None
    graph_costs = CaptureCosts()

    def __init__(self, slowdown: float, clock: Clock) -> None:
        self._slowdown = slowdown
        self._clock = clock
        self._free_at_s = 0.0
        self._num_steps = 0

    def launch(self, plan: StepPlan, *draws_and_mask: object) -> ModelledStep:  # noqa: ARG002
        took = step_ms(plan.rows)
        began_s = self._clock()
        self._clock.work(took)
        # The first kernels run while the last ones are launched.
        device_s = max(self._free_at_s, began_s) + self._slowdown * took.device / 1e3
        ends_s = self._free_at_s = max(device_s, began_s + self._slowdown * took.host / 1e3)
        self._num_steps += 1
        token = FIRST_WORD + self._num_steps * 7 % (VOCAB - FIRST_WORD)
        return ModelledStep(plan.rows, lambda: self._clock.wait_until(ends_s), token)

    def prepare(self) -> bool:
        return False


class ModelledEngine(StepLoop):
    """Keeps the contract of an engine, without sleep and without pages in host memory."""

    shares_device = False

    def __init__(self, slowdown: float, clock: Clock, step_s: float = STEP_S) -> None:
        sizes = {0: PROMPT_SIZES} | {streams: mixed_sizes(streams) for streams in STREAM_SIZES}
        limits = SchedulerLimits(MAX_ROWS, STEP_TOKENS, step_s, CONTEXT_TOKENS, RESERVED_TOKENS, sizes)
        costs = StepCosts(WORK, DeviceLimits(1e12, 1e14))
        scheduler = Scheduler(KVPages({None: NUM_PAGES}, PAGE_TOKENS), limits, costs)
        runner = cast("Any", ModelledRunner(slowdown, clock))
        speculation = Speculation(FastestWidths((1,), 0.0, lambda: 0, 0.0), is_on=False)
        none = cast("Any", None)
        super().__init__(scheduler, runner, none, Counters(), speculation, overlaps=True, clock=clock)
        self.info = engine_info(NUM_PAGES, kv_bytes=1)

    def submit(self, request: EngineRequest) -> None:
        self.add(request)

    def keep_pages(self, host: object) -> None:
        """Nothing is in its pages."""

    def close(self) -> None:
        """There is nothing to free."""


def load(*_: object) -> ModelledEngine:
    """What a worker loads its engine with: no file and no device is needed."""
    return ModelledEngine(float(os.environ[SLOWDOWN]), RealClock())


class Seen(NamedTuple):
    """What the clients of a simulation saw."""

    first_s: dict[str, float]
    """To the first token, by request."""
    gaps_s: list[float]
    tokens_per_s: float

    def __str__(self) -> str:
        first, gaps = (
            [f"{percentile(times, share) * 1e3:.1f}" for share in (0.5, 0.9, 0.99)]
            for times in (self.first_s.values(), self.gaps_s)
        )
        return f"{self.tokens_per_s:,.0f} tok/s, first token {' / '.join(first)} ms, gap {' / '.join(gaps)} ms"


def simulate(requests: Sequence[tuple[float, int, int]], step_s: float = STEP_S) -> Seen:
    """Requests as (second of arrival, prompt tokens, response tokens), all of one key."""
    clock, draw = VirtualClock(), random.Random(0)
    engine = ModelledEngine(1.0, clock, step_s)
    coming = [(str(number), *request) for number, request in enumerate(requests)][::-1]
    born: dict[str, float] = {}
    last: dict[str, float] = {}
    seen, num_tokens = Seen({}, [], 0.0), 0
    while coming or engine.has_work:
        while coming and (coming[-1][1] <= clock() or not engine.has_work):
            name, at_s, num_prompt, num_response = coming.pop()
            clock.wait_until(at_s)
            prompt = tuple(draw.choices(range(FIRST_WORD, VOCAB), k=num_prompt))
            engine.submit(EngineRequest(name, prompt, num_response, SamplingParams()))
            born[name] = at_s
        for output in engine.step():
            name, num_tokens = output.request_id, num_tokens + len(output.tokens)
            if name in last:
                seen.gaps_s.append(clock() - last[name])
            else:
                seen.first_s[name] = clock() - born[name]
            last[name] = clock()
    return seen._replace(tokens_per_s=num_tokens / clock())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[1e3 * STEP_S])
    parser.add_argument("--per-s", type=float, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--seconds", type=float, default=12)
    options = parser.parse_args()
    for bound_ms in options.step_ms:
        for per_s in options.per_s:
            seen = simulate(arriving_requests(per_s, options.seconds), bound_ms / 1e3)
            print(f"steps up to {bound_ms:g} ms, {per_s:g} arrivals per second: {seen}")


if __name__ == "__main__":
    main()
