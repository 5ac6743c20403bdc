"""Decodes with the engine and with llama.cpp in turns, on the same GGUF file, cores and numbers of threads.

    g++ -O2 -I llama.cpp/include -I llama.cpp/ggml/include bench/llama_peer.cpp -L llama.cpp/build/bin \\
        -lllama -lggml -lggml-base -Wl,-rpath,llama.cpp/build/bin -o llama_peer
    PYTHONPATH=src python bench/cpu.py --model model.gguf --peer ./llama_peer --threads 1,2,8

Both programs stay loaded and run alternately, so that other load on the machine meets both. Prints the best and the
median of the turns by wall time, and their processor time. Build llama.cpp for the processor that it runs on: packages
often have its kernels for old processors only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from workloads import weights_read

PROMPT_TOKENS, DECODED_TOKENS = 32, 64


class Run(NamedTuple):
    """Seconds of one turn."""

    prompt_s: float
    decode_s: float
    decode_processor_s: float


class Program:
    """A child process that makes a run for each line on its stdin, pinned to some cores."""

    def __init__(self, command: list[str], cores: list[int], threads: int) -> None:
        settings = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "1000"} if command[0] == sys.executable else {}
        self._process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings,
        )

    def run(self) -> Run:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{PROMPT_TOKENS} {DECODED_TOKENS}\n")
        self._process.stdin.flush()
        prompt_s, decode_s, processor_s = map(float, self._process.stdout.readline().split())
        return Run(prompt_s, decode_s, processor_s)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve_runs(path: str, threads: int) -> None:
    """The engine as a child process."""
    torch.set_num_threads(threads)
    spec = LoadSpec(path, max_num_seqs=1, context_tokens=1024, memory_bytes=160 << 20)
    loaded = load_model(spec, torch.device("cpu"), lambda *_: None, lambda: False)
    ratio = loaded.weight_bytes / Path(path).stat().st_size
    engine = Engine(loaded, spec)
    print(f"{weights_read(engine.info)}; {ratio:.2f} times the file", file=sys.stderr)
    for number, line in enumerate(sys.stdin):
        prompt, decoded = map(int, line.split())
        tokens = tuple(range(1000 * number + 100, 1000 * number + 100 + prompt))
        sampling = SamplingParams(temperature=0.0)
        engine.submit(EngineRequest(str(number), tokens, max_tokens=decoded + 1, sampling=sampling))
        start = time.perf_counter()
        engine.step()
        middle, processor = time.perf_counter(), time.process_time()
        while engine.has_work:
            engine.step()
        print(middle - start, time.perf_counter() - middle, time.process_time() - processor, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer", required=True, help="bench/llama_peer.cpp, built")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    print("| threads | engine | decode, best tok/s | median | processor ms per token, best | prompt tok/s |")
    print("|---|---|---|---|---|---|")
    for threads in map(int, options.threads.split(",")):
        cores = sorted(os.sched_getaffinity(0))[:threads]
        arguments = [options.model, str(threads)]
        programs = {
            "llama.cpp": Program([options.peer, *arguments], cores, threads),
            "cortex": Program([sys.executable, __file__, "--serve", *arguments], cores, threads),
        }
        runs: dict[str, list[Run]] = {name: [] for name in programs}
        for turn in range(options.turns + 1):
            for name, program in programs.items():
                run = program.run()
                if turn:  # the first one warms up
                    runs[name].append(run)
        for name, program in programs.items():
            program.end()
            decode_s = [run.decode_s for run in runs[name]]
            best, median = (DECODED_TOKENS / seconds for seconds in (min(decode_s), statistics.median(decode_s)))
            processor_ms = 1e3 * min(run.decode_processor_s for run in runs[name]) / DECODED_TOKENS
            prompt = PROMPT_TOKENS / min(run.prompt_s for run in runs[name])
            print(f"| {threads} | {name} | {best:.1f} | {median:.1f} | {processor_ms:.1f} | {prompt:.0f} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_runs(sys.argv[2], int(sys.argv[3]))
    else:
        main()
