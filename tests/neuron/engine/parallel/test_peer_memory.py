"""Ranks in processes of their own that share one GPU, on which they take turns, milliseconds long.

Run with `-s` to see how far each rank is; one that takes longer than `DUMP_AFTER_S` shows its stack. The host of a rank
may wait for its own device, and so for a message that another rank has yet to send, when it allocates, loads a kernel
or captures. That ends, because no rank waits on the host for one that waits on its device. Still kernels are compiled
and loaded before the ranks meet, and ranks meet before each message, so that it is easy to see where one is stuck.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from cortex.ipc.child import die_with_parent
from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.execution import model_graphs
from cortex.neuron.engine.execution.graphs import CudaCapture, Graph, Outputs
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.parallel import group as group_module
from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.parallel.peer_memory import PeerMemory
from cortex.neuron.engine.parallel.ranks import Follower, load_engine
from cortex.neuron.engine.request import EngineRequest, LoadSpec, RankSpec, SamplingParams
from cortex.neuron.kernels.peer_buffer import BUFFER_BYTES, MAX_BYTES, NUM_FLAGS
from cortex.neuron.kernels.peer_exchange import peer_sum, peer_sum_reference
from cortex.neuron.layers.configs import Shard
from cortex.neuron.layers.parallel import UNLIMITED_BYTES
from cortex.neuron.worker.faults import FaultKind, classify

from ...engine_runs import run, tokens_of
from ...tiny_models import write_llama

pytestmark = pytest.mark.gpu

NUM_RANKS = 2
NUM_REPLAYS = 2
TIMEOUT_S = 300.0
POLL_S = 1.0
DUMP_AFTER_S = 40.0
LOST_AFTER_S = 2
DEVICE = torch.device("cuda:0")
SPEC = LoadSpec("", dtype="bfloat16", max_num_seqs=2, context_tokens=256, memory_bytes=64 << 20)
LONG_TOKENS = 650
KEPT_BYTES = 64 << 20
SHAPES = ((1, 4096, torch.bfloat16), (8, 8192, torch.float32))


def part_of(rank: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + rank)
    return torch.randn((rows, columns), generator=generator).to(DEVICE, dtype)


def requests(max_tokens: int = 6) -> list[EngineRequest]:
    greedy, seeded = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=7, top_k=20)
    prompt = tuple(range(5, 75))
    return [
        EngineRequest("greedy", prompt, max_tokens=max_tokens, sampling=greedy),
        EngineRequest("seeded", prompt[:33], max_tokens=max_tokens, sampling=seeded),
    ]


class Ranks:
    """Runs `target` with (stage, directory, plans of each rank) in processes, which are killed at the end of `with`."""

    def __init__(self, target: Any, directory: Path, *arguments: Any) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._results: Queue[tuple[int, Any]] = context.Queue()
        # Kept: a queue that is collected before a rank has opened it is gone.
        self._plans = [context.SimpleQueue() for _ in range(NUM_RANKS)]
        started_s = time.monotonic()
        self._processes = [
            context.Process(
                target=_run,
                args=(
                    target,
                    Stage(rank, started_s),
                    os.getpid(),
                    str(directory),
                    self._plans,
                    self._results,
                    *arguments,
                ),
            )
            for rank in range(NUM_RANKS)
        ]
        for process in self._processes:
            process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Returns when all ranks have ended."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(TIMEOUT_S)

    def results(self) -> list[Any]:
        """What each of them returned."""
        found: dict[int, Any] = {}
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(found) < NUM_RANKS:
            with contextlib.suppress(queue.Empty):
                rank, result = self._results.get(timeout=POLL_S)
                found[rank] = result
                assert not isinstance(result, str), result
                continue
            codes = [process.exitcode for rank, process in enumerate(self._processes) if rank not in found]
            assert codes == [None] * len(codes), f"a rank died: exit codes {codes}"
            assert time.monotonic() < deadline_s, f"only ranks {sorted(found)} ended within {TIMEOUT_S:.0f} s"
        return [found[rank] for rank in range(NUM_RANKS)]

    def exit_code(self, rank: int) -> int | None:
        """Waits until a rank has ended by itself; None if it does not."""
        self._processes[rank].join(TIMEOUT_S)
        return self._processes[rank].exitcode


class Stage:
    """Called with how far a rank is, on standard error. The clock is that of the host."""

    def __init__(self, rank: int, started_s: float) -> None:
        self.rank = rank
        self._started_s = started_s

    def __call__(self, text: str) -> None:
        seconds = time.monotonic() - self._started_s
        print(f"{seconds:6.1f} s, rank {self.rank}: {text}", file=sys.stderr, flush=True)


def _run(target: Any, stage: Stage, parent: int, directory: str, plans: Any, results: Any, *arguments: Any) -> None:
    die_with_parent(parent)
    faulthandler.dump_traceback_later(DUMP_AFTER_S, repeat=True)
    stage("started")
    torch.cuda.set_device(DEVICE)
    torch.zeros(1, device=DEVICE)
    stage("has the device")
    try:
        results.put((stage.rank, target(stage, directory, plans, *arguments)))
    except BaseException:  # noqa: BLE001 - shown by the test
        results.put((stage.rank, traceback.format_exc()))
    torch.cuda.synchronize()  # raises if the device is lost, and the process ends
    signal.pause()  # until it is killed: other ranks may still use its memory


def load_kernels(rank: int) -> None:
    """Compiles and loads the kernels of all messages of `exchange`. With all flags up, no message waits."""
    buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device=DEVICE)
    buffer.view(torch.int32)[:NUM_FLAGS] = 1 << 30
    peers = PeerMemory(Shard(rank, NUM_RANKS), [buffer] * NUM_RANKS)
    peers.sum(torch.zeros(4, device=DEVICE))  # what a group begins with
    for rows, columns, dtype in SHAPES:
        part = torch.zeros((rows, columns), dtype=dtype, device=DEVICE)
        peers.sum(part)
        peers.gather(part)
        peers.gather(part.reshape(1, -1))
    torch.cuda.synchronize()


def exchange(stage: Stage, directory: str, plans: Any) -> list[list[float]]:
    """The largest error of each call: a sum, a gather and a broadcast, called, captured, and replayed. At the end the
    first rank sends a message that the other one never answers."""
    del plans
    rank = stage.rank
    load_kernels(rank)
    stage("has loaded the kernels")
    group = TorchGroup.join(RankSpec(rank, NUM_RANKS, directory), DEVICE, lambda: None)
    stage(f"joined; peer memory: {group.uses_peers}")
    assert group.uses_peers
    assert group.num_bytes == BUFFER_BYTES
    errors = []
    for number, (rows, columns, dtype) in enumerate(SHAPES):

        def meet(event: str, number: int = number) -> None:
            torch.cuda.synchronize()
            group.wait_for_all(f"{event} {number}")
            stage(f"{event}, shape {number}")

        assert rows * columns * dtype.itemsize <= MAX_BYTES
        parts = [part_of(each, rows, columns, dtype) for each in range(NUM_RANKS)]
        expected = (peer_sum_reference(parts), torch.cat(parts, dim=-1), parts[0])

        def step(own: Tensor = parts[rank]) -> tuple[Tensor, Tensor, Tensor]:
            return group.all_reduce(own.clone()), group.all_gather(own), group.broadcast(own.clone())

        meet("calls")
        outputs = [tensor.clone() for tensor in step()]
        meet("captures")
        graph, captured = CudaCapture(may_fail=True)(step)
        for replay in range(NUM_REPLAYS):
            for tensor in captured:
                tensor.zero_()
            meet(f"replays, {replay}")
            graph.replay(1)
            outputs += [tensor.clone() for tensor in captured]
        wanted = expected * (len(outputs) // 3)
        errors.append([(a.float() - b.float()).abs().max().item() for a, b in zip(outputs, wanted, strict=True)])
        meet("compared")
    large = torch.ones(MAX_BYTES, dtype=torch.float32, device=DEVICE)
    errors.append([(group.all_reduce(large) - NUM_RANKS).abs().max().item()])  # through the library
    stage("sent a large message through the library")
    if rank == 0:
        stage("waits on the device for a rank that sends nothing")
        assert group.peers is not None
        peer_sum(torch.ones(4, device=DEVICE), group.peers.addresses, rank, wait_limit_s=LOST_AFTER_S)
        with pytest.raises(RuntimeError) as lost:
            torch.cuda.synchronize()
        assert classify(lost.value) is FaultKind.DEVICE
        stage(f"got an error: {str(lost.value).splitlines()[0]}")
    return errors


def test_processes_share_memory(tmp_path: Path) -> None:
    """The rank that loses the other one ends by itself, and the device still works."""
    with Ranks(exchange, tmp_path) as ranks:
        for errors in ranks.results():
            assert not any(error for call in errors for error in call), errors
        assert ranks.exit_code(0)
    assert torch.ones(4, device=DEVICE).sum().item() == 4


class QueueLink:
    def __init__(self, plans: Any) -> None:
        self._plans = plans

    def follow_others(self) -> None: ...

    def turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def announce(self, plan: Any) -> None:
        for each in self._plans:
            each.put(plan)


Responses = dict[str, list[int]]


def responses(engine: Engine) -> Responses:
    return {name: tokens_of(outputs) for name, outputs in run(engine, *requests()).items()}


class CountedCapture(CudaCapture):
    num_graphs = 0
    """The graphs that this process has captured."""

    def __call__(self, step: Callable[[], Outputs]) -> tuple[Graph, Outputs]:
        captured = super().__call__(step)
        CountedCapture.num_graphs += 1
        return captured


def serve(stage: Stage, directory: str, plans: Any, path: str) -> tuple[int, list[Responses]]:
    """How many graphs this rank has, and the responses of the whole model, of the divided one, and of the divided one
    after it slept. Each rank first runs the whole model, alone, which compiles most kernels."""
    rank = stage.rank
    whole = Engine.load(replace(SPEC, path=path), DEVICE, lambda *_: None, lambda: False)
    answers = [responses(whole)]
    whole.close()
    stage("has run the whole model")
    spec = replace(SPEC, path=path, rank=RankSpec(rank, NUM_RANKS, directory))
    link = QueueLink(plans[1:]) if rank == 0 else None
    with mock.patch.object(model_graphs, "CudaCapture", CountedCapture):  # not after a sleep
        engine = load_engine(spec, DEVICE, lambda *_: None, lambda: False, link)
    stage("has loaded its share")
    if isinstance(engine, Follower):
        while (plan := plans[rank].get()) is not None:
            if plan == "sleep":
                engine.sleep()
            elif plan == "wake":
                engine.wake(lambda *_: None)
            else:
                engine.follow(plan)
        engine.close()
        return CountedCapture.num_graphs, []
    while engine.prepare():
        stage("captured a graph")
    answers.append(responses(engine))
    stage("responded")
    engine.sleep()
    plans[1].put("sleep")
    plans[1].put("wake")
    engine.wake(lambda *_: None)
    stage("slept and woke")
    while engine.prepare():
        stage("captured a graph")
    answers.append(responses(engine))
    stage("responded")
    plans[1].put(None)
    engine.close()
    return CountedCapture.num_graphs, answers


def test_divided_model_replays_graphs_with_its_messages(tmp_path: Path) -> None:
    path = write_llama(tmp_path, std=0.1, hidden_size=256, intermediate_size=512)
    (tmp_path / "ranks").mkdir()
    with Ranks(serve, tmp_path / "ranks", str(path)) as ranks:
        (leading, (whole, divided, woken)), (following, _) = ranks.results()
    assert leading == following > 2  # decode steps of sizes 1 and 2, and short prompts
    assert divided == woken
    assert divided["greedy"][:3] == whole["greedy"][:3]  # later ones may differ by rounding


def keep(stage: Stage, directory: str, plans: Any, path: str) -> tuple[list[tuple[list[int], int]], int]:
    """The responses of a model that is loaded twice, and asked twice the first time, with how many tokens of the prompt
    had come from host memory by then; and how many blocks this rank has there."""
    answers: list[tuple[list[int], int]] = []
    host: DeviceHostMemory | None = None
    for load in range(2):
        rank = RankSpec(stage.rank, NUM_RANKS, f"{directory}/{load}")
        spec = replace(SPEC, path=path, model_id="m", context_tokens=LONG_TOKENS + 32, rank=rank)
        link = QueueLink(plans[1:]) if stage.rank == 0 else None
        engine = load_engine(spec, DEVICE, lambda *_: None, lambda: False, link)
        host = engine.keep_pages(host)
        assert host is not None
        host.store.limit(KEPT_BYTES)
        stage("has loaded its share")
        if isinstance(engine, Follower):
            while (plan := plans[stage.rank].get()) is not None:
                engine.follow(plan)
        else:
            prompt = tuple(place * 7 % 83 + 3 for place in range(LONG_TOKENS))
            for _ in range(2 - load):
                outputs = run(engine, EngineRequest("r", prompt, 6, SamplingParams(temperature=0.0)))["r"]
                answers.append((tokens_of(outputs), engine.stats().fetched_tokens))
            engine.save_pages()
            plans[1].put(None)
        stage("has saved its pages")
        engine.close()
    assert host is not None
    host.store.check_integrity()
    return answers, len(host.store)


def test_divided_model_continues_from_pages_in_host_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 2 * LONG_TOKENS}
    path = write_llama(tmp_path, std=0.1, **sizes)
    for load in range(2):
        (tmp_path / "ranks" / str(load)).mkdir(parents=True)
    with Ranks(keep, tmp_path / "ranks", str(path)) as ranks:
        ((computed, cached, fetched), leading), (_, following) = ranks.results()
    assert leading == following > 0
    assert computed[1] == cached[1] == 0
    assert fetched[1] == LONG_TOKENS // 32 * 32, "all whole pages"
    assert fetched[0] == cached[0], "steps of the same sizes on the same pages"
    assert fetched[0][:1] == computed[0][:1]  # later ones may differ by rounding


def test_library_is_captured_too(tmp_path: Path) -> None:
    """A group of one rank: NCCL rejects two on one card."""
    group = TorchGroup.join(RankSpec(0, 1, str(tmp_path), "nccl"), DEVICE, lambda: None)
    assert group.max_captured_bytes == UNLIMITED_BYTES
    own = torch.ones(1 << 20, device=DEVICE)
    out = torch.zeros_like(own)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        out.add_(group.all_reduce(own.clone()))
        return out, out, out

    graph, _ = CudaCapture(may_fail=True)(step)
    out.zero_()
    for _ in range(3):
        graph.replay(1)
    torch.cuda.synchronize()
    assert out.eq(3).all()
    del graph
    group.close()


def test_library_that_cannot_be_captured_is_connected_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "can_capture", lambda *_: False)
    group = TorchGroup.join(RankSpec(0, 1, str(tmp_path), "nccl"), DEVICE, lambda: None)
    assert group.max_captured_bytes == 0
    assert group.all_reduce(torch.ones(4, device=DEVICE)).sum().item() == 4
    group.close()
