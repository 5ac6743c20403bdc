"""Profiles one decode step of a shape inside its graph: each kernel with its launches and times.

    PYTHONPATH=src python bench/step_profile.py --model qwen3.6-35b-a3b --quant q4 --layers 8
    PYTHONPATH=src python bench/step_profile.py --model llama-3.1-8b --streams 96 --joining 1024 --top-p 0.9

With `--joining`, a prompt joins the streams in every step.

Kernels of one name are told apart by their grids. `us` is the time from the start of a launch to its end. Launches
overlap, so `adds` is what a launch adds to the step: from the end of the one before it to its own end. The matrices
follow with the time that their bytes take at the limit measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from engine import random_engine, read_limit
from shapes import SHAPES
from workloads import weights_read

STEPS = 20
TIMED_STEPS = 200
PROMPT_TOKENS = 512
MEMORY_BYTES = 40 << 30
"""The weights of the largest shape and the KV of some streams."""


@dataclass(slots=True)
class Launches:
    """All launches of one kernel with one grid."""

    us: list[float] = field(default_factory=list)
    adds_us: list[float] = field(default_factory=list)


def profiled(
    engine: Engine, streams: int, joining: int, sampling: SamplingParams
) -> tuple[list[dict[str, Any]], float]:
    """The kernels of STEPS decode steps, by start, and the microseconds of a step that is not profiled. A prompt of
    `joining` tokens joins each of them."""
    numbers = itertools.count()

    def submit(num_tokens: int, max_tokens: int) -> None:
        number = next(numbers)
        prompt = tuple(1000 + (number * 7919 + place) % 30_000 for place in range(num_tokens))
        engine.submit(EngineRequest(str(number), prompt, max_tokens, sampling))

    def step() -> None:
        if joining:
            submit(joining, 1)
        engine.step()

    for _ in range(streams):
        submit(PROMPT_TOKENS, STEPS + TIMED_STEPS + 60)
    for _ in range(20):
        engine.step()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step()
    torch.cuda.synchronize()
    step_us = (time.perf_counter() - start) / TIMED_STEPS * 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    while engine.has_work:
        engine.step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    return sorted(kernels, key=lambda event: event["ts"]), step_us


def by_kernel(events: Sequence[dict[str, Any]]) -> dict[tuple[str, str], Launches]:
    launches: dict[tuple[str, str], Launches] = defaultdict(Launches)
    end = None
    for event in events:
        grid = "x".join(str(size) for size in event["args"].get("grid", ()))
        own = launches[event["name"].split("(")[0][:46], grid]
        own.us.append(event["dur"])
        stop = event["ts"] + event["dur"]
        own.adds_us.append(0.0 if end is None else max(0.0, stop - end))
        end = stop if end is None else max(end, stop)
    return launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--quant", help="as in bench/engine.py")
    parser.add_argument("--layers", type=int, help="fewer layers, for a faster start")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--joining", type=int, default=0, metavar="TOKENS", help="of a prompt in every step")
    parser.add_argument("--top-p", type=float, help="draw tokens; default: greedy")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    torch.cuda.set_device(0)
    bytes_per_s = read_limit(device)
    if arguments.layers:
        SHAPES[arguments.model] |= {"num_hidden_layers": arguments.layers}
    spec = LoadSpec(
        "",
        max_num_seqs=max(8, arguments.streams + min(8, arguments.joining)),
        speculation="off",
        memory_bytes=MEMORY_BYTES,
    )
    engine = random_engine(arguments.model, device, spec, arguments.quant)
    engine.warm_up()
    while engine.prepare():
        pass
    print(weights_read(engine.info))
    sampling = SamplingParams(temperature=0.0) if arguments.top_p is None else SamplingParams(top_p=arguments.top_p)
    events, step_us = profiled(engine, arguments.streams, arguments.joining, sampling)
    launches = by_kernel(events)
    adds_us = sum(sum(own.adds_us) for own in launches.values()) / STEPS
    print(
        f"{len(events) / STEPS:.0f} launches; a step takes {step_us:.0f} us, profiled {adds_us:.0f} us; "
        f"limit {bytes_per_s / 1e12:.2f} TB/s"
    )
    print(f"{'kernel':46} {'grid':12} {'a step':>7} {'us':>6} {'adds':>6} {'of step':>7}")
    for (name, grid), own in sorted(launches.items(), key=lambda item: -sum(item[1].adds_us)):
        count, total_us = len(own.us), sum(own.adds_us)
        print(
            f"{name:46} {grid:12} {count / STEPS:7.1f} {sum(own.us) / count:6.1f} {total_us / count:6.1f} "
            f"{total_us / STEPS / adds_us:7.1%}"
        )
    matrices = {id(binding.matrix): binding.matrix for binding in engine.model.parameters.packed_bindings}.values()
    shapes: dict[tuple[int, int, int], int] = defaultdict(int)
    for matrix in matrices:
        shapes[matrix.outputs, matrix.inputs, matrix.num_bytes] += 1
    for (outputs, inputs, num_bytes), count in shapes.items():
        print(f"{count:4} of {outputs} x {inputs}: {num_bytes / 1e6:.2f} MB, {num_bytes / bytes_per_s * 1e6:.1f} us")


if __name__ == "__main__":
    main()
