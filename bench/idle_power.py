"""What an idle CUDA context draws, and what it costs to let it drop to the idle clock.

    PYTHONPATH=src:bench python bench/idle_power.py --json idle_power.json

The same engine runs twice, each time in a process of its own: without and with CUDA_DISABLE_PERF_BOOST=1, which must be
set before the context exists. Prints the watts of the device without a context and with an idle one, the time to a
first token after 20 seconds of idleness and right after other work, and the decode rates under load. Takes under two
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import mean, median

import pynvml
import torch

from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from engine import Bench, random_engine
from shapes import SHAPES

VARIABLE = "CUDA_DISABLE_PERF_BOOST"
IDLE_S = (20.0, 8.0, 8.0)
PROMPT_TOKENS = 256
DEVICE = 0


def watts() -> float:
    handle = pynvml.nvmlDeviceGetHandleByIndex(DEVICE)
    return float(pynvml.nvmlDeviceGetPowerUsage(handle)) / 1e3


def mean_watts(seconds: float) -> float:
    readings = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        readings.append(watts())
        time.sleep(0.1)
    return mean(readings)


def first_token_s(bench: Bench) -> float:
    """A prompt that nothing is cached of, to its first token."""
    bench.next_id += 1
    first = bench.next_id % 1000
    prompt = tuple((first + 7 * place) % 1000 for place in range(PROMPT_TOKENS))
    start = time.perf_counter()
    bench.engine.submit(EngineRequest(str(bench.next_id), prompt, 1, SamplingParams(temperature=0.0)))
    while bench.engine.has_work:
        bench.engine.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(shape: str) -> dict[str, float]:
    device = torch.device("cuda", DEVICE)
    torch.cuda.set_device(device)
    spec = LoadSpec("", max_num_seqs=32, speculation="off")
    engine = random_engine(shape, device, spec, None)
    engine.compiled(lambda *_: None, lambda: False)
    engine.warm_up()
    while engine.prepare():
        pass
    bench = Bench(engine, device)
    for _ in range(3):
        first_token_s(bench)
    under_load: list[float] = []
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(0.1):
            under_load.append(watts())

    sampler = threading.Thread(target=sample)
    sampler.start()
    rates = {f"decode-{n} tok/s": n / median(bench.workloads.decode_step_s(n) for _ in range(3)) for n in (1, 32)}
    is_over.set()
    sampler.join()
    hot_s = median(first_token_s(bench) for _ in range(5))
    idle_watts, cold = [], []
    for seconds in IDLE_S:
        time.sleep(seconds - 4)
        idle_watts.append(mean_watts(4))
        cold.append(first_token_s(bench))
    return {
        "idle W": min(idle_watts),
        "loaded W": max(under_load),
        **rates,
        "first token, hot ms": hot_s * 1e3,
        f"first token, after {IDLE_S[0]:.0f} s ms": cold[0] * 1e3,
        "first token, after idleness, median ms": median(cold) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    pynvml.nvmlInit()
    if arguments.inner:
        print(json.dumps(measure(arguments.model)))
        return
    results: dict[str, dict[str, float]] = {"no context": {"idle W": mean_watts(3)}}
    for name, value in (("boost", None), ("no boost", "1")):
        environment = {key: each for key, each in os.environ.items() if key != VARIABLE}
        environment |= {} if value is None else {VARIABLE: value}
        command = [sys.executable, __file__, "--inner", "--model", arguments.model]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
    print(f"driver {pynvml.nvmlSystemGetDriverVersion()}; no context {results['no context']['idle W']:.1f} W")
    for name, with_boost in results["boost"].items():
        without = results["no boost"][name]
        print(f"{name:42} {with_boost:10.2f} {without:10.2f}  {without / with_boost - 1:+.2%}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
