"""The engine alone on one GPU: random weights of a named shape, no server, nothing but torch and triton.

    PYTHONPATH=src python bench/engine.py --model qwen3-8b --scenarios decode-1,prefill-2048 --json out.json

A decode scenario's speed is (tokens after the first) / (total time − time of the same run with one output token).
Bytes per second count what a step must read (weights once, each row's KV and states once; of experts those that so
many rows choose if they choose evenly); the limit is measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.kv import page_bytes
from cortex.neuron.engine.loading import build_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.engine.state_memory import state_bytes
from cortex.neuron.layers.moe import MoE
from cortex.neuron.layers.parameters import Parameters
from shapes import SHAPES
from workloads import DECODE_PROMPT_TOKENS, DECODED_TOKENS, Prompt, Workloads, told

SCENARIOS = (
    "decode-1",
    "decode-8",
    "decode-32",
    "decode-64",
    "decode-256",
    "prefill-2048",
    "prefill-8192",
    "prefill-16384",
    "cached-16384",
    "requests-512",
)
GREEDY = SamplingParams(temperature=0.0)


def random_engine(shape: str, device: torch.device, max_num_seqs: int) -> Engine:
    def fill(parameters: Parameters) -> None:
        for binding in parameters.bindings:
            view = binding.destination
            view.normal_(1.0, 0.1) if view.dim() == 1 else view.normal_(0.0, view.shape[-1] ** -0.5)

    spec = LoadSpec(path="", max_num_seqs=max_num_seqs)
    return Engine(build_model(SHAPES[shape], spec, device, fill), spec)


class Bench:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.workloads = Workloads(self.run, engine.info.vocab_size)
        self.next_id = 0

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> float:
        """Seconds from submission to the last token of all of them."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for prompt in prompts:
            self.next_id += 1
            self.engine.submit(EngineRequest(str(self.next_id), prompt, max_tokens, GREEDY))
        while self.engine.has_work:
            self.engine.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def decode(self, streams: int, limit_bytes_per_s: float) -> dict[str, float]:
        step_s = self.workloads.decode_step_s(streams)
        info = self.engine.info
        model = self.engine._runner.model
        dtype = model.parameters.dtype
        kv_bytes = (DECODE_PROMPT_TOKENS + DECODED_TOKENS // 2) * page_bytes(model.attentions, 1, dtype)
        row_bytes = streams * (kv_bytes + state_bytes(model.gated_deltas, dtype))
        read = info.weight_bytes - self._embedding_bytes() - self._idle_expert_bytes(streams) + row_bytes
        return {
            "tok/s": streams / step_s,
            "ms": step_s * 1e3,
            "GB/s": read / step_s / 1e9,
            "of limit": read / step_s / limit_bytes_per_s,
        }

    def _embedding_bytes(self) -> int:
        """The embedding is looked up, not read through."""
        model = self.engine._runner.model
        return 0 if model.config.tied else model.embedding.weight.numel() * model.embedding.weight.element_size()

    def _idle_expert_bytes(self, rows: int) -> float:
        """What so many rows leave alone of all layers' experts, if they choose evenly."""
        blocks = (getattr(layer, "mlp", None) for layer in self.engine._runner.model.layers)
        mixtures = [block.experts for block in blocks if isinstance(block, MoE)]
        idle = 0.0
        for experts in mixtures:
            expert_bytes = experts.gate_up[0].nbytes + experts.down[0].nbytes
            idle += (1 - experts.top_k / experts.num_routed) ** rows * experts.num_routed * expert_bytes
        return idle

    def prefill(self, tokens: int, limit_flops: float) -> dict[str, float]:
        seconds = self.workloads.prefill_s(tokens)
        model = self.engine._runner.model
        config = model.config
        dense = (self.engine.info.weight_bytes - self._idle_expert_bytes(1)) / 2 - 2 * config.vocab * config.hidden
        attention = 2 * tokens * config.heads * config.head_dim * len(model.attentions)
        flops = tokens * (2 * dense + attention)
        return {
            "tok/s": tokens / seconds,
            "ms": seconds * 1e3,
            "TFLOP/s": flops / seconds / 1e12,
            "of limit": flops / seconds / limit_flops,
        }

    def cached(self, tokens: int) -> dict[str, float]:
        return {"ms": self.workloads.cached_s(tokens) * 1e3}

    def requests(self, count: int) -> dict[str, float]:
        return {"tok/s": self.workloads.requests_tokens_per_s(count)}


def timed(function: Callable[[], object], repeats: int = 20) -> float:
    """Median seconds on the device."""
    times: list[float] = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times[3:])[repeats // 2]


def read_limit(device: torch.device) -> float:
    """Bytes per second of a large matrix-vector product."""
    matrix = torch.randn(151936, 8192, device=device, dtype=torch.bfloat16)
    vector = torch.randn(8192, 1, device=device, dtype=torch.bfloat16)
    return matrix.numel() * 2 / timed(lambda: matrix @ vector)


def matrix_limit(device: torch.device) -> float:
    """Floating-point operations per second of a large bf16 product."""
    left, right = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16)
    return 2 * 8192**3 / timed(lambda: left @ right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    torch.cuda.set_device(0)
    limits = {"bytes/s": read_limit(device), "flop/s": matrix_limit(device)}
    torch.cuda.empty_cache()
    start = time.perf_counter()
    engine = random_engine(arguments.model, device, arguments.max_num_seqs)
    torch.cuda.synchronize()
    built = time.perf_counter()
    engine.warm_up()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.model}")
    print(f"limits: {limits['bytes/s'] / 1e12:.2f} TB/s, {limits['flop/s'] / 1e12:.0f} TFLOP/s")
    print(f"built in {built - start:.1f} s, warmed up in {time.perf_counter() - built:.1f} s", flush=True)
    bench = Bench(engine)
    results: dict[str, dict[str, float]] = {}
    for scenario in arguments.scenarios.split(","):
        kind, size = scenario.split("-")
        results[scenario] = {
            "decode": lambda n: bench.decode(n, limits["bytes/s"]),
            "prefill": lambda n: bench.prefill(n, limits["flop/s"]),
            "cached": bench.cached,
            "requests": bench.requests,
        }[kind](int(size))
        print(told(scenario, results[scenario]), flush=True)
    engine.check_integrity()
    if arguments.json:
        report = {"model": arguments.model, "limits": limits, "results": results}
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
