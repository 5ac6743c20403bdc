"""Measures KV in host memory: a conversation after its model slept, or was loaded again, and what copying costs when
nothing comes back. Random weights of a named shape on one GPU.

    PYTHONPATH=src python bench/host_pages.py --model qwen3-8b

The limit of a fetch is the measured rate of one large copy from page-locked memory.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.memory import HostSlabs
from cortex.neuron.engine.host_pages.store import HostPages
from cortex.neuron.engine.memory.host_weights import HostBuffer
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from engine import random_engine
from workloads import weights_read

DEVICE = torch.device("cuda", 0)
CONVERSATION_TOKENS = 16_384


class Measured:
    """An engine and the times of its requests."""

    def __init__(self, shape: str, kv_tokens: int, host: DeviceHostMemory | None, quant: str | None) -> None:
        torch.manual_seed(0)
        probe = random_engine(shape, DEVICE, LoadSpec(path="", max_num_seqs=1, context_tokens=64), quant)
        info = probe.info
        per_token = info.kv_bytes / (info.num_pages + 1) / info.page_tokens
        probe.close()
        del probe
        torch.manual_seed(0)
        limit = int(info.weight_bytes + kv_tokens * per_token + (64 << 20))
        spec = LoadSpec(path="", max_num_seqs=64, context_tokens=20_000, memory_bytes=limit)
        self.engine: Engine = random_engine(shape, DEVICE, spec, quant)
        self.engine.warm_up()
        if host is not None:
            self.engine.keep_pages(host)
        self._next = 0

    def run(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[float, int, list[int]]:
        """Seconds until all have ended, the tokens that were cached, and the last tokens."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for prompt in prompts:
            self._next += 1
            sampling = SamplingParams(temperature=0.0)
            self.engine.submit(EngineRequest(f"r{self._next}", prompt, max_tokens, sampling))
        cached = 0
        last: list[int] = []
        while self.engine.has_work:
            for output in self.engine.step():
                cached += output.cached_tokens or 0
                last += output.tokens[-1:]
        torch.cuda.synchronize()
        return time.perf_counter() - start, cached, last

    def idle(self) -> float:
        start = time.perf_counter()
        while self.engine.prepare():
            pass
        return time.perf_counter() - start


def text(seed: int, count: int) -> tuple[int, ...]:
    chosen = random.Random(seed)
    return tuple(chosen.randrange(10, 50_000) for _ in range(count))


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def bus_rate() -> float:
    """Bytes per second of one large copy to the device."""
    buffer = HostBuffer(1 << 30, pinned=True)
    there = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    best_s = min(seconds(lambda: there.copy_(buffer.bytes, non_blocking=True)) for _ in range(3))
    buffer.release()
    return (1 << 30) / best_s


def measure_conversation(shape: str, host: DeviceHostMemory, quant: str | None) -> None:
    conversation = text(1, CONVERSATION_TOKENS)
    measured = Measured(shape, 40_000, host, quant)
    engine = measured.engine
    print(weights_read(engine.info))
    measured.run([text(0, CONVERSATION_TOKENS)], 2)
    computed_s, _, tokens = measured.run([conversation], 1)
    print(f"16k computed {computed_s * 1e3:.1f} ms; graphs and copies while idle {measured.idle():.2f} s")
    size = host.store.num_bytes
    print(f"in host memory {size / 1e9:.2f} GB; 16k on the device {measured.run([conversation], 1)[0] * 1e3:.1f} ms")
    slept_s, woken_s = seconds(engine.sleep), seconds(lambda: engine.wake(lambda *_: None))
    print(f"sleep {slept_s * 1e3:.0f} ms, wake {woken_s * 1e3:.0f} ms")
    for name in ("after the wake", "after the load"):
        if name == "after the load":
            engine.save_pages()
            engine.close()
            measured = Measured(shape, 40_000, host, quant)
        measured.run([text(2, 512)], 1)
        took_s, cached, again = measured.run([conversation], 1)
        print(f"16k {name}: {took_s * 1e3:.1f} ms, {cached} cached, same token {again == tokens}", flush=True)
    measured.engine.close()


def measure_pressure(shape: str, host: DeviceHostMemory | None, quant: str | None) -> dict[str, float]:
    """Seconds of requests that share nothing, while the pages of earlier ones are given up."""
    times: dict[str, list[float]] = {}
    measured = Measured(shape, 40_000, host, quant)
    for number in range(12):  # the pool is full from here on
        measured.run([text(100 + number, 4096)], 1)
    for seed in range(1000, 6000, 1000):
        prompts = [text(seed + number, 4096) for number in range(8)]
        times.setdefault("8 prompts of 4096", []).append(measured.run(prompts, 1)[0])
        prompts = [text(seed + 100 + number, 64) for number in range(64)]
        times.setdefault("64 streams of 192", []).append(measured.run(prompts, 192)[0])
    measured.engine.close()
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--quant")
    parser.add_argument("--host-mb", type=int, default=8192)
    arguments = parser.parse_args()
    print(f"bus to the device {bus_rate() / 1e9:.1f} GB/s")
    slabs = HostSlabs(DEVICE)
    host = DeviceHostMemory(HostPages(slabs, arguments.host_mb << 20), slabs)
    measure_conversation(arguments.model, host, arguments.quant)
    host.store.shrink(0)
    with_host = measure_pressure(arguments.model, host, arguments.quant)
    print(f"under pressure {host.store.num_bytes / 1e9:.2f} GB went to host memory")
    for name, without_s in measure_pressure(arguments.model, None, arguments.quant).items():
        with_s = with_host[name]
        print(f"{name}: {without_s * 1e3:.1f} ms without, {with_s * 1e3:.1f} ms with ({with_s / without_s - 1:+.2%})")


if __name__ == "__main__":
    main()
