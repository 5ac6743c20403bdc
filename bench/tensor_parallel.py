"""A model divided among processes, against the same model as a whole: tokens, speed, and what the collectives cost.

    python bench/tensor_parallel.py MODEL --ranks 2 --device cuda:0 --backend gloo

runs all ranks on one GPU, which proves the kernels with the shapes of a rank. With one GPU per rank, `--device cuda`
gives rank r the device `cuda:r`, and `--backend nccl` is the one to measure. The last lines state the tokens per second
to expect from the compute of one rank and from the cost of its collectives.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from typing import Any

from cortex.neuron.engine.request import EngineRequest, LoadSpec, RankSpec, SamplingParams

PROMPT = tuple(range(100, 356))
DECODE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Measured:
    tokens: tuple[int, ...]
    prompt_s: float
    step_s: float
    """Of one decoded token."""
    collectives_s: float = 0.0
    """Part of `step_s` that this rank spent in collectives, which includes the wait for slower ranks."""
    num_collectives: float = 0.0
    """Per decoded token."""


class QueueLink:
    """Announces plans through the queues of the other processes."""

    def __init__(self, queues: list[Any]) -> None:
        self._queues = queues

    def follow_others(self) -> None:
        """There are no other models."""

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        yield

    def announce(self, plan: Any) -> None:
        for queue in self._queues:
            queue.put(plan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or GGUF file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="of all ranks, or `cuda` for one GPU each")
    parser.add_argument("--memory-mb", type=int, default=4096, help="weights and KV cache of each rank; 0: no limit")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        whole = run(processes, options, [None])
        ranks = [RankSpec(rank, options.ranks, directory, options.backend) for rank in range(options.ranks)]
        divided = run(processes, options, ranks)
    same = sum(a == b for a, b in zip(whole.tokens, divided.tokens, strict=True))
    print(f"equal greedy tokens: {same} of {len(whole.tokens)}")
    for name, one in (("one device", whole), (f"{options.ranks} ranks", divided)):
        print(f"{name}: prompt of {len(PROMPT)} in {one.prompt_s * 1e3:.0f} ms, {1 / one.step_s:.1f} tokens/s")
    compute_s = divided.step_s - divided.collectives_s
    each_s = divided.collectives_s / divided.num_collectives
    print(
        f"per token: {compute_s * 1e3:.2f} ms compute and host, {divided.collectives_s * 1e3:.2f} ms in "
        f"{divided.num_collectives:.0f} collectives ({each_s * 1e6:.0f} µs each)"
    )
    for microseconds in (10, 30, 100):
        expected = 1 / (compute_s + divided.num_collectives * microseconds * 1e-6)
        print(f"with collectives of {microseconds} µs expect {expected:.1f} tokens/s")


def run(processes: Any, options: argparse.Namespace, ranks: Sequence[RankSpec | None]) -> Measured:
    """Runs every rank in its own process and returns what the first one measured."""
    queues = [processes.SimpleQueue() for _ in ranks]
    receiver, sender = processes.Pipe(duplex=False)
    children = [
        processes.Process(target=run_rank, args=(options, rank, index, queues, sender), daemon=True)
        for index, rank in enumerate(ranks)
    ]
    for child in children:
        child.start()
    sender.close()
    measured: Measured = receiver.recv()
    for child in children:
        child.join()
    return measured


def run_rank(
    options: argparse.Namespace, rank: RankSpec | None, index: int, queues: list[SimpleQueue[Any]], results: Connection
) -> None:
    from cortex.neuron.engine.parallel.ranks import Follower, load_engine

    device = f"cuda:{index}" if options.device == "cuda" else options.device
    spec = LoadSpec(
        options.model,
        dtype=options.dtype,
        context_tokens=2048,
        max_num_seqs=4,
        memory_bytes=options.memory_mb << 20 if options.memory_mb else None,
        rank=rank,
    )
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_device(device)
    link = QueueLink(queues[1:]) if index == 0 else None
    engine = load_engine(spec, device, lambda *_: None, lambda: False, link)
    if isinstance(engine, Follower):
        while (plan := queues[index].get()) is not None:
            engine.follow(plan)
        return
    results.send(measure(engine))
    for queue in queues[1:]:
        queue.put(None)


def measure(engine: Any) -> Measured:
    spent = count_collectives(engine)
    greedy = SamplingParams(temperature=0.0)
    for number in range(2):  # the first run compiles and warms up; the second must not find its prompt in the cache
        engine.submit(EngineRequest("r", (number, *PROMPT), max_tokens=DECODE_TOKENS + 1, sampling=greedy))
        tokens: list[int] = []
        started_s = time.perf_counter()
        while not tokens:
            tokens += [token for output in engine.step() for token in output.tokens]
        first_s = time.perf_counter()
        spent.clear()
        while engine.has_work:
            tokens += [token for output in engine.step() for token in output.tokens]
        ended_s = time.perf_counter()
    count = DECODE_TOKENS
    return Measured(
        tuple(tokens), first_s - started_s, (ended_s - first_s) / count, sum(spent) / count, len(spent) / count
    )


def count_collectives(engine: Any) -> list[float]:
    """Seconds of each collective from now on."""
    spent: list[float] = []
    group = engine.model.parameters.group
    for name in ("all_reduce", "all_gather", "broadcast"):
        call = getattr(group, name)

        def timed(tensor: Any, call: Any = call) -> Any:
            if tensor.is_cuda:
                import torch

                torch.cuda.synchronize()
            started_s = time.perf_counter()
            result = call(tensor)
            if tensor.is_cuda:
                torch.cuda.synchronize()
            spent.append(time.perf_counter() - started_s)
            return result

        if not group.shard.is_whole:
            setattr(group, name, timed)
    return spent


if __name__ == "__main__":
    main()
