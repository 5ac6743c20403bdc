"""What real requests cost an engine on a GPU, next to greedy ones: sampled, joining streams, arriving at random.

    PYTHONPATH=src:bench python bench/request_kinds.py kinds joining arrivals

`kinds`: a decode step of 1, 64 and 256 streams for each kind of sampling, and its share of the greedy speed.
`joining`: the time to the first token of a prompt that joins running streams. `arrivals`: Poisson arrivals with
log-normal lengths, and below each rate where its time goes: steps by kind, with what the host takes to launch one.
Weights are random, and draft tokens are off: a random model repeats itself.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.execution.runner import Runner
from cortex.neuron.engine.memory.device_limits import measure_limits
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.engine.roofline.step_costs import StepCosts, StepShape
from engine import GREEDY, random_engine
from shapes import SHAPES
from workloads import arriving_requests, percentile, weights_read

SAMPLED = SamplingParams(temperature=0.7, top_p=0.9)
KINDS = {
    "greedy": GREEDY,
    "temperature": SamplingParams(),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "t 0.7, top_p 0.8, top_k 20": SamplingParams(temperature=0.7, top_p=0.8, top_k=20),
    "min_p": SamplingParams(min_p=0.05),
    "seed": SamplingParams(seed=4, top_p=0.9),
    "penalties": SamplingParams(temperature=0.7, presence_penalty=1.5, frequency_penalty=0.2),
    "repetition": SamplingParams(temperature=0.7, repetition_penalty=1.1),
    "logprobs 5": SamplingParams(temperature=0.0, top_logprobs=5),
    "bias of 300": SamplingParams(temperature=0.0, logit_bias=tuple((token, 1.0) for token in range(300))),
    "greedy again": GREEDY,
}
STREAMS = (1, 64, 256)
WARM_STEPS, TIMED_STEPS, TRIES = 60, 30, 3
JOINING_TOKENS = (16, 64, 128, 256, 400, 800, 2000)
ARRIVALS_PER_S, ARRIVAL_S = (4, 8, 16, 32), 12


class Bench:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._random = random.Random(3)
        self._num_requests = 0

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        most = min(self._engine.info.vocab_size, 120_000)
        return tuple(self._random.randrange(1000, most) for _ in range(num_tokens))

    def submit(self, num_tokens: int, max_tokens: int, sampling: SamplingParams) -> str:
        self._num_requests += 1
        name = str(self._num_requests)
        self._engine.submit(EngineRequest(name, self.prompt(num_tokens), max_tokens, sampling))
        return name

    def steps(self, count: int) -> float:
        """Seconds of one of `count` steps."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            self._engine.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    def end(self, names: list[str]) -> None:
        for name in names:
            self._engine.cancel(name)
        while self._engine.has_work:
            self._engine.step()

    def kinds(self) -> Iterator[str]:
        for streams in STREAMS:
            greedy_s = 0.0
            for kind, sampling in KINDS.items():
                names = [self.submit(64, 400, sampling) for _ in range(streams)]
                self.steps(WARM_STEPS)
                step_s = min(self.steps(TIMED_STEPS) for _ in range(TRIES))
                self.end(names)
                greedy_s = greedy_s or step_s
                yield f"{streams:4} streams, {kind:28} {step_s * 1e3:7.3f} ms ({greedy_s / step_s:.3f} of greedy)"

    def joining(self) -> Iterator[str]:
        for sampling, kind in ((GREEDY, "greedy"), (SAMPLED, "sampled")):
            for streams in (16, 48):
                names = [self.submit(500, 400, sampling) for _ in range(streams)]
                self.steps(WARM_STEPS)
                step_ms = self.steps(TIMED_STEPS) * 1e3
                found = [
                    (tokens, min(self._first_token_ms(tokens, sampling) for _ in range(TRIES)))
                    for tokens in JOINING_TOKENS
                ]
                self.end(names)
                cells = ", ".join(f"{tokens}: {ms:.1f}" for tokens, ms in found)
                yield f"{streams} {kind} streams, step {step_ms:.2f} ms; ms to the first token, by prompt: {cells}"

    def _first_token_ms(self, num_tokens: int, sampling: SamplingParams) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        name = self.submit(num_tokens, 2, sampling)
        while not any(output.request_id == name and output.tokens for output in self._engine.step()):
            pass
        took_ms = (time.perf_counter() - start) * 1e3
        self.steps(4)
        return took_ms

    def arrivals(self) -> Iterator[str]:
        for per_s in ARRIVALS_PER_S:
            with recorded_steps() as steps:
                yield f"{per_s} arrivals per second: {self._arrive(per_s)}"
            yield from by_kind(steps)

    def _arrive(self, per_s: int) -> str:
        coming = arriving_requests(per_s, ARRIVAL_S)
        coming.reverse()
        born: dict[str, float] = {}
        last: dict[str, float] = {}
        first_s, gaps_s, num_tokens = [], [], 0
        start = time.perf_counter()
        while coming or self._engine.has_work:
            while coming and coming[-1][0] <= time.perf_counter() - start:
                at, prompt, response = coming.pop()
                born[self.submit(prompt, response, SAMPLED)] = at
            if not self._engine.has_work:
                time.sleep(0.0005)
                continue
            for output in self._engine.step():
                now, name = time.perf_counter() - start, output.request_id
                num_tokens += len(output.tokens)
                if output.tokens:
                    if name in last:
                        gaps_s.append(now - last[name])
                    else:
                        first_s.append(now - born[name])
                    last[name] = now
        rate = num_tokens / (time.perf_counter() - start)
        return f"{rate:,.0f} tok/s, first token {_percentiles(first_s)}, gaps {_percentiles(gaps_s)}"


class Step(NamedTuple):
    shape: StepShape
    took_s: float
    launched_s: float
    """What the host took to launch the one after it, which may include reading this one."""
    notes: str
    """What may have held that launch up: memory taken, garbage collected."""


@contextmanager
def recorded_steps() -> Iterator[list[Step]]:
    """All steps of the block, from where the step loop measures them."""
    record, launch, steps = StepCosts.record, Runner.launch, list[Step]()
    launched_s, notes = 0.0, ""
    collecting_s = [0.0, 0.0]

    def collecting(phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            collecting_s[1] = time.perf_counter()
        else:
            collecting_s[0] += time.perf_counter() - collecting_s[1]

    def allocated() -> tuple[int, int]:
        return torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]

    def recorded(costs: StepCosts, shape: StepShape, seconds: float) -> None:
        steps.append(Step(shape, seconds, launched_s, notes))
        record(costs, shape, seconds)

    def launched(runner: Runner, *arguments: Any) -> Any:
        nonlocal launched_s, notes
        before, collecting_s[0] = allocated(), 0.0
        start = time.perf_counter()
        result = launch(runner, *arguments)
        launched_s = time.perf_counter() - start
        device, host = (now - then for now, then in zip(allocated(), before, strict=True))
        plan = arguments[0]
        notes = (
            f"{plan.num_tokens} tokens in {len(plan.rows)} rows, memory taken on the device {device} and here {host} "
        )
        notes += f"times, {collecting_s[0] * 1e3:.1f} ms of garbage collection"
        return result

    gc.callbacks.append(collecting)
    with patch.object(StepCosts, "record", recorded), patch.object(Runner, "launch", launched):
        yield steps
    gc.callbacks.remove(collecting)


def by_kind(steps: list[Step]) -> Iterator[str]:
    """By the number of streams, in sixteens, and of prompt tokens, in powers of two; and the slowest launches."""
    kinds: defaultdict[tuple[int, int], list[Step]] = defaultdict(list)
    for step in steps:
        kinds[step.shape.num_streams // 16 * 16, step.shape.prompt_tokens.bit_length()].append(step)
    total_s = sum(step.took_s for step in steps)
    for (streams, bits), own in sorted(kinds.items(), key=lambda entry: -sum(step.took_s for step in entry[1]))[:12]:
        share = sum(step.took_s for step in own) / total_s
        prompt = f"{1 << bits - 1} to {(1 << bits) - 1} prompt tokens" if bits else "no prompt"
        took = _percentiles([step.took_s for step in own])
        launched = _percentiles([step.launched_s for step in own])
        yield f"    {share:4.0%} in {len(own):4} steps of {streams}+ streams, {prompt}: {took}; launch {launched}"
    for step in sorted(steps, key=lambda step: -step.launched_s)[:4]:
        yield f"    {step.launched_s * 1e3:.0f} ms of the host to launch {step.notes}"


def _percentiles(seconds: list[float]) -> str:
    p50, p90, p99 = (percentile(seconds, share) * 1e3 for share in (0.5, 0.9, 0.99))
    return f"p50 {p50:.1f} p90 {p90:.1f} p99 {p99:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("kinds", "joining", "arrivals"))
    parser.add_argument("--model", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--quant", help="as of bench/engine.py")
    arguments = parser.parse_args()
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    limits = measure_limits(device, 4 << 30)
    assert limits is not None, "that much is enough"
    spec = LoadSpec("", max_num_seqs=max(STREAMS), speculation="off")
    engine = random_engine(arguments.model, device, spec, arguments.quant)
    engine.compiled(lambda *_: None, lambda: False)
    engine.warm_up()
    while engine.prepare():
        pass
    print(f"{torch.cuda.get_device_name()}, {arguments.model}, {weights_read(engine.info)}")
    print(f"limits: {limits.bytes_per_s / 1e12:.2f} TB/s, {limits.flops / 1e12:.0f} TFLOP/s", flush=True)
    bench = Bench(engine)
    for what in arguments.what:
        for line in getattr(bench, what)():
            print(line, flush=True)
    engine.check_integrity()


if __name__ == "__main__":
    main()
