"""A model divided among processes, against the same model as a whole: tokens, speed, and what the links must carry.

    python bench/divided.py MODEL --ranks 2 --device cuda:0 --backend tcp

runs the model on one device, with every layer divided (`tensor_parallel`) and with its layers divided
(`pipeline_parallel`). All ranks on one GPU prove the kernels with the shapes of a rank. With one GPU per rank,
`--device cuda` gives rank r the device `cuda:r`, and `--backend nccl` is the one to measure. The last lines of each
plan state the traffic of a token, and the tokens per second to expect from the compute time of the ranks with links of
different speeds: `--message-us` takes those that `neuron tp-smoke` measures.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from cortex.neuron.engine.request import EngineRequest, LoadSpec, RankSpec, SamplingParams, StageSpec

PROMPT = tuple(range(100, 356))
DECODE_TOKENS = 64
CALLS = ("all_reduce", "all_gather", "broadcast", "send", "receive")


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rank takes for one decoded token, unless it says otherwise."""

    tokens: tuple[int, ...]
    prompt_s: float
    """Seconds for the whole prompt."""
    step_s: float
    messages_s: float = 0.0
    """Part of `step_s` that this rank spent in messages, which includes the wait for other ranks."""
    num_messages: float = 0.0
    num_bytes: float = 0.0
    """What this rank gave to the link."""

    @property
    def compute_s(self) -> float:
        return self.step_s - self.messages_s


@dataclass(slots=True)
class Messages:
    """The messages of this process: how many, how long, how large."""

    count: int = 0
    seconds: float = 0.0
    num_bytes: int = 0

    def add(self, name: str, seconds: float, num_bytes: int) -> None:
        self.count += 1
        self.seconds += seconds
        self.num_bytes += 0 if name == "receive" else num_bytes


class QueueLink:
    """Announces plans through the queues of the other processes."""

    def __init__(self, queues: list[Any]) -> None:
        self._queues = queues

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        yield

    def announce(self, plan: Any) -> None:
        for queue in self._queues:
            queue.put(plan)

    def follow_others(self) -> None:
        """There are no others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory or GGUF file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="of all ranks, or `cuda` for one GPU each")
    parser.add_argument("--memory-mb", type=int, default=4096, help="weights and KV cache of each rank; 0: no limit")
    parser.add_argument("--backend", choices=["sockets", "nccl"], default="sockets")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs, whose messages are not counted")
    parser.add_argument(
        "--message-us",
        type=float,
        nargs="+",
        default=[10, 50, 200, 1000],
        help="what messages cost on the links to state tokens/s for, as `neuron tp-smoke` measures them there",
    )
    parser.add_argument("--plans", nargs="+", choices=["tensor", "pipeline"], default=["tensor", "pipeline"])
    options = parser.parse_args()
    [whole] = run(options, [LoadSpec(options.model)])
    print(f"one device: prompt of {len(PROMPT)} in {whole.prompt_s * 1e3:.0f} ms, {1 / whole.step_s:.1f} tokens/s")
    for plan in options.plans:
        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            spec = LoadSpec(options.model, stages=stages_of(options) if plan == "pipeline" else ())
            ranks = [RankSpec(rank, options.ranks, directory, options.backend) for rank in range(options.ranks)]
            measured = run(options, [replace(spec, rank=rank) for rank in ranks])
        report(plan, whole, measured, options.message_us)


def stages_of(options: argparse.Namespace) -> tuple[StageSpec, ...]:
    """Equal numbers of layers."""
    from cortex.neuron.models.registry import read_architecture
    from cortex.neuron.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(Path(options.model))
    num_layers = read_architecture(checkpoint.config).config.num_layers
    checkpoint.close()
    starts = [num_layers * rank // options.ranks for rank in range(options.ranks + 1)]
    return tuple(StageSpec(start, stop - start) for start, stop in itertools.pairwise(starts))


def report(plan: str, whole: Measured, ranks: Sequence[Measured], message_us: Sequence[float]) -> None:
    leader = ranks[0]
    same = sum(a == b for a, b in zip(whole.tokens, leader.tokens, strict=True))
    print(f"\n{plan}_parallel = {len(ranks)}: {same} of {len(whole.tokens)} greedy tokens are equal")
    print(f"prompt of {len(PROMPT)} in {leader.prompt_s * 1e3:.0f} ms, {1 / leader.step_s:.1f} tokens/s")
    if not leader.num_messages:
        return
    each = ", ".join(f"{one.compute_s * 1e3:.2f}" for one in ranks)
    print(f"compute and host of the ranks: {each} ms per token")
    if plan == "tensor":
        compute_s, waits = max(one.compute_s for one in ranks), leader.num_messages
    else:  # a token passes one stage after the other
        compute_s, waits = sum(one.compute_s for one in ranks), float(len(ranks))
    cost_s = max(0.0, leader.step_s - compute_s) / waits
    word = "collective" if plan == "tensor" else "hop"
    print(f"{waits:.0f} {word}s of {cost_s * 1e6:.0f} µs per token")
    print(f"each rank sends {max(one.num_bytes for one in ranks) / 1e3:.1f} kB per token")
    for microseconds in message_us:
        expected = 1 / (compute_s + waits * microseconds * 1e-6)
        print(f"with {word}s of {microseconds:g} µs expect {expected:.1f} tokens/s")


def run(options: argparse.Namespace, specs: Sequence[LoadSpec]) -> list[Measured]:
    """Runs every rank in its own process and returns what each measured."""
    processes = multiprocessing.get_context("spawn")
    queues = [processes.SimpleQueue() for _ in specs]
    pipes = [processes.Pipe(duplex=False) for _ in specs]
    children = [
        processes.Process(target=run_rank, args=(options, spec, index, queues, sender), daemon=True)
        for index, (spec, (_, sender)) in enumerate(zip(specs, pipes, strict=True))
    ]
    for child, (_, sender) in zip(children, pipes, strict=True):
        child.start()
        sender.close()
    measured: list[Measured] = [receiver.recv() for receiver, _ in pipes]
    for child in children:
        child.join()
    return measured


def run_rank(
    options: argparse.Namespace, spec: LoadSpec, index: int, queues: list[SimpleQueue[Any]], results: Connection
) -> None:
    from cortex.neuron.engine.parallel.ranks import Follower, load_engine

    device = f"cuda:{index}" if options.device == "cuda" else options.device
    memory_bytes = options.memory_mb << 20 if options.memory_mb else None
    stages = tuple(replace(stage, memory_bytes=memory_bytes) for stage in spec.stages)
    sizes = replace(spec, context_tokens=2048, max_num_seqs=4, memory_bytes=memory_bytes, stages=stages)
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_device(device)
    messages = Messages() if options.graphs else count_messages()
    link = QueueLink(queues[1:]) if index == 0 else None
    engine = load_engine(replace(sizes, dtype=options.dtype), device, lambda *_: None, lambda: False, link)
    if isinstance(engine, Follower):
        results.send(follow(engine, queues[index], messages))
        return
    results.send(measure(engine, messages, queues[1:]))
    for queue in queues[1:]:
        queue.put(None)


def follow(engine: Any, queue: SimpleQueue[Any], messages: Messages) -> Measured:
    """Follows until the leader ends; measures the steps of one token since the leader last said `"measure"`."""
    spent_s = 0.0
    while (plan := queue.get()) is not None:
        if plan == "measure":
            spent_s, messages.seconds, messages.count, messages.num_bytes = 0.0, 0.0, 0, 0
            continue
        started_s = time.perf_counter()
        engine.follow(plan)
        spent_s += time.perf_counter() - started_s
    return measured((), 0.0, spent_s, messages)


def measure(engine: Any, messages: Messages, followers: Sequence[SimpleQueue[Any]]) -> Measured:
    greedy = SamplingParams(temperature=0.0)
    for number in range(2):  # the first run compiles and warms up; the second must not find its prompt in the cache
        engine.submit(EngineRequest("r", (number, *PROMPT), max_tokens=DECODE_TOKENS + 1, sampling=greedy))
        tokens: list[int] = []
        started_s = time.perf_counter()
        while not tokens:
            tokens += [token for output in engine.step() for token in output.tokens]
        first_s = time.perf_counter()
        messages.seconds, messages.count, messages.num_bytes = 0.0, 0, 0
        for queue in followers:
            queue.put("measure")
        while engine.has_work:
            tokens += [token for output in engine.step() for token in output.tokens]
        ended_s = time.perf_counter()
    return measured(tuple(tokens), first_s - started_s, ended_s - first_s, messages)


def measured(tokens: tuple[int, ...], prompt_s: float, spent_s: float, messages: Messages) -> Measured:
    count = DECODE_TOKENS
    return Measured(
        tokens, prompt_s, spent_s / count, messages.seconds / count, messages.count / count, messages.num_bytes / count
    )


def count_messages() -> Messages:
    """Counts the messages between the ranks of this process from now on. Steps with messages are not captured then."""
    from cortex.neuron.engine.parallel.group import TorchGroup

    setattr(TorchGroup, "max_captured_bytes", 0)  # noqa: B010 - a property

    messages = Messages()
    for name in CALLS:
        call = getattr(TorchGroup, name)

        def timed(group: Any, tensor: Any, *others: Any, call: Any = call, name: str = name) -> Any:
            synchronize = functools.partial(_synchronize, tensor)
            synchronize()
            started_s = time.perf_counter()
            result = call(group, tensor, *others)
            synchronize()
            messages.add(name, time.perf_counter() - started_s, tensor.numel() * tensor.element_size())
            return result

        setattr(TorchGroup, name, timed)
    return messages


def _synchronize(tensor: Any) -> None:
    if tensor.is_cuda:
        import torch

        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
