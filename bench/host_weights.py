"""A mixture with experts in host memory: speed, against the bytes that the CPU must read and against llama.cpp, and
tokens, against the same model on the device.

    python bench/host_weights.py --model gpt-oss-120b --quant mxfp4 --memory-mb 24000
    python bench/host_weights.py --model tiny-mixture --memory-mb 16 --prompts 256,1024 --device cpu

Against llama.cpp on the same random file (`--n-cpu-moe`), with the ratios that are the goals:

    bench/build_llama_cpp.sh SOURCE build
    python bench/host_weights.py --model gpt-oss-120b --gguf /dev/shm/m.gguf --peer build/bin/llama-batched-bench
    python bench/host_weights.py --model qwen3-30b-a3b --memory-mb 8000 --gguf /dev/shm/q.gguf --peer ...
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import LoadedModel, build_model, load_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.layers.parameters import Binding, Parameters
from engine import device_named, packing, random_four_bits
from random_gguf import expert_bytes, write_random_gguf
from shapes import SHAPES

GREEDY = SamplingParams(temperature=0.0)
GOALS = {"decode 1": 1.3, "decode 8": 2.0, "prompt 2048": 3.0, "prompt 8192": 3.0}
"""Times llama.cpp."""
DECODED, SHORT_PROMPT, PEER_KEPT_MB = 64, 24, 2500
"""The last: what llama.cpp has on the device beside weights."""


def peer_rates(peer: str, path: Path, layers: int, prompts: Sequence[int]) -> dict[str, float]:
    """Tokens per second of llama.cpp with the experts of so many layers in page-locked host memory. The better of two
    runs: its first one of a shape loads kernels."""
    lengths = [SHORT_PROMPT, *prompts]
    arguments = [peer, "-m", str(path), "-ngl", "99", "-ncmoe", str(layers), "-t", str(len(os.sched_getaffinity(0)))]
    arguments += ["--load-mode", "none", "-b", "2048", "-ub", "2048", "-fa", "on", "--kv-unified"]
    arguments += ["-npp", ",".join(str(length) for length in lengths for _ in range(2)), "-ntg", str(DECODED)]
    # It leaves out what the context has no room for: several streams of long prompts.
    arguments += ["-npl", "1,8", "-c", str(max(max(lengths), 8 * SHORT_PROMPT + 7 * DECODED) + DECODED)]
    done = subprocess.run([*arguments, "--output-format", "jsonl"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{peer} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = {}
    for line in (done.stdout + done.stderr).splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            is_short = row["pp"] == SHORT_PROMPT
            name = f"decode {row['pl']}" if is_short else f"prompt {row['pp']}"
            if is_short or row["pl"] == 1:
                found[name] = max(found.get(name, 0.0), row["speed_tg" if is_short else "speed_pp"])
    return found


def print_table(own: dict[str, float], peer: dict[str, float]) -> None:
    print(f"{'':12} {'cortex':>10} {'llama.cpp':>10} {'ratio':>7} {'goal':>5}")
    for name, rate in own.items():
        if name in peer:
            goal = GOALS.get(name)
            verdict = "" if goal is None else "reached" if rate >= goal * peer[name] else "missed"
            print(f"{name:12} {rate:10.1f} {peer[name]:10.1f} {rate / peer[name]:7.2f} {goal or '':>5} {verdict}")


def fill_by_name(quant: str | None, device: torch.device, parameters: Parameters) -> None:
    """The same weights wherever they lie."""

    def seed(name: str) -> None:
        torch.manual_seed(zlib.crc32(name.encode()))

    def put(binding: Binding) -> None:
        for part in binding.parts:
            put(part)
        if not binding.parts:
            seed(binding.source)
            view = binding.destination
            view.normal_(1.0, 0.1) if view.dim() == 1 else view.normal_(0.0, view.shape[-1] ** -0.5)

    for binding in parameters.bindings:
        put(binding)
    for packed in parameters.row_bindings:
        seed(packed.source)
        rows, inputs = packed.num_rows, packed.matrix.inputs
        if quant == "mxfp4":
            packed.matrix.put_codes(packed.first_row, *random_four_bits(rows, inputs, device))
        else:
            packed.matrix.put_values(packed.first_row, torch.randn(rows, inputs, device=device) * inputs**-0.5)


class Run:
    def __init__(self, loaded: LoadedModel, spec: LoadSpec, device: torch.device) -> None:
        self.engine = Engine(loaded, spec)
        self.device = device
        self._next = 0

    def warm(self) -> None:
        if self.device.type == "cuda":
            self.engine.compiled(lambda *_: None, lambda: False)
        self.engine.warm_up()

    def tokens(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams = GREEDY
    ) -> list[list[int]]:
        found = self._submitted(prompts, count, sampling)
        while self.engine.has_work:
            self._step(found)
        self._synchronise()
        return list(found.values())

    def step_seconds(self, prompts: Sequence[Sequence[int]], count: int, started: Callable[[], None]) -> float:
        """Of a step that decodes all of them. `started` is called when their prompts are computed."""
        found = self._submitted(prompts, count + 1, SamplingParams())
        while not all(found.values()):
            self._step(found)
        self._synchronise()
        started()
        before, start = max(map(len, found.values())), time.perf_counter()
        while self.engine.has_work:
            self._step(found)
        self._synchronise()
        return (time.perf_counter() - start) / (count + 1 - before)

    def _submitted(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: SamplingParams
    ) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for prompt in prompts:
            self._next += 1
            found[str(self._next)] = []
            self.engine.submit(EngineRequest(str(self._next), list(prompt), count, sampling))
        return found

    def _step(self, found: dict[str, list[int]]) -> None:
        for output in self.engine.step():
            found[output.request_id] += output.tokens

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        """Of tokens that are drawn: the greedy ones of random weights repeat, and so do their experts."""
        start = time.perf_counter()
        self.tokens(prompts, count, SamplingParams())
        return time.perf_counter() - start


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count, length), generator=generator).tolist()


def host_bandwidth() -> float:
    values = torch.ones(1 << 28)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - start)
    return values.nbytes / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-oss-120b", choices=SHAPES)
    parser.add_argument("--quant", help="as bench/engine.py has it")
    parser.add_argument("--memory-mb", type=int, default=24_000)
    parser.add_argument("--host-mb", type=int, default=100_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-resident", action="store_true", help="the whole model does not fit, or takes too long")
    parser.add_argument("--prompts", default="2048,8192")
    parser.add_argument("--gguf", type=Path, help="load this file; it is written if it is not there")
    parser.add_argument("--peer", help="llama.cpp's llama-batched-bench; needs --gguf")
    arguments = parser.parse_args()
    if arguments.peer and not arguments.gguf:
        parser.error("--peer needs --gguf")
    device, config = device_named(arguments.device), SHAPES[arguments.model]
    vocab = config["vocab_size"]
    short = random_prompts(2, 24, vocab, 1)
    layouts = packing(arguments.quant)
    path = "" if arguments.gguf is None else str(arguments.gguf)
    if arguments.gguf is not None and not arguments.gguf.exists():
        write_random_gguf(arguments.gguf, config)
    base = LoadSpec(path, max_num_seqs=8, speculation="off", context_tokens=10_240)

    def loaded(spec: LoadSpec) -> LoadedModel:
        start = time.perf_counter()
        if spec.path:
            model = load_model(spec, device, lambda *_: None, lambda: False)
        else:
            model = build_model(
                config, spec, device, lambda parameters: fill_by_name(arguments.quant, device, parameters), layouts
            )
        print(
            f"  loaded in {time.perf_counter() - start:.1f} s: {model.weight_bytes / 1e9:.1f} GB on the device",
            flush=True,
        )
        return model

    expected = None
    if not arguments.no_resident:
        print("on the device", flush=True)
        whole = Run(loaded(base), base, device)
        whole.warm()
        expected = [whole.tokens([prompt], 16)[0] for prompt in short]
        decoded = whole.seconds(short[:1], 65) - whole.seconds(short[:1], 1)
        print(f"  decode 1 stream {64 / decoded:.1f} tok/s", flush=True)
        whole.engine.close()
        del whole

    print(f"with {arguments.memory_mb} MB", flush=True)
    spec = replace(base, memory_bytes=arguments.memory_mb << 20, host_weight_bytes=arguments.host_mb << 20)
    model = loaded(spec)
    team = model.team
    if team is None or model.host is None or team.rates is None:
        raise SystemExit("the model fits: nothing is in host memory; choose a smaller --memory-mb")
    rates = team.rates
    print(
        f"  {model.host.num_bytes / 1e9:.1f} GB in host memory; CPU {rates.host / 1e9:.1f} GB/s, "
        f"bus {rates.bus / 1e9:.1f} GB/s, {rates.rows / 1e9:.1f} GB/s for a further row, notes {model.notes}",
        flush=True,
    )
    run = Run(model, spec, device)
    start = time.perf_counter()
    run.warm()
    print(f"  warm in {time.perf_counter() - start:.1f} s", flush=True)
    if expected is not None:
        found = [run.tokens([prompt], 16)[0] for prompt in short]
        same = [
            next((at for at, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
            for x, y in zip(expected, found, strict=True)
        ]
        print(f"  greedy tokens equal up to {same} of 16", flush=True)
    while run.engine.prepare():
        pass
    bandwidth, own = host_bandwidth(), dict[str, float]()
    for streams in (1, 8):
        prompts = random_prompts(streams, SHORT_PROMPT, vocab, 2)
        run.seconds(prompts, 8)
        step_s = run.step_seconds(prompts, DECODED, team.forget_counts)
        own[f"decode {streams}"] = streams / step_s
        chosen, pairs = team.layers[0].num_chosen(streams)  # rows of a step read an expert once
        read = team.host_read_bytes() / DECODED * chosen / pairs
        floor_s = read / bandwidth
        print(
            f"  decode {streams} streams: {streams / step_s:.1f} tok/s, {step_s * 1e3:.2f} ms per step; "
            f"host experts {read / 1e9:.3f} GB per step, floor {floor_s * 1e3:.2f} ms "
            f"at {bandwidth / 1e9:.0f} GB/s: {floor_s / step_s:.2f} of it; {team.num_exchanges} exchanges so far",
            flush=True,
        )
    for length in map(int, arguments.prompts.split(",")):
        run.seconds(random_prompts(1, length, vocab, 3), 1)
        seconds = run.seconds(random_prompts(1, length, vocab, 4), 1)
        own[f"prompt {length}"] = length / seconds
        carried = sum(layer.num_places * layer.expert_bytes for layer in team.layers)
        print(
            f"  prompt {length}: {length / seconds:.0f} tok/s, {seconds * 1e3:.0f} ms; "
            f"bus floor {carried / rates.bus * 1e3:.0f} ms",
            flush=True,
        )
    run.engine.close()
    del run, model, team
    gc.collect()
    if arguments.peer:
        lacking = arguments.gguf.stat().st_size - ((arguments.memory_mb - PEER_KEPT_MB) << 20)
        layers = min(config["num_hidden_layers"], max(0, -(-lacking // expert_bytes(config))))
        print(f"llama.cpp, experts of {layers} layers in host memory", flush=True)
        print_table(
            own, peer_rates(arguments.peer, arguments.gguf, layers, list(map(int, arguments.prompts.split(","))))
        )


if __name__ == "__main__":
    main()
