"""Ranks in processes of their own that share one GPU: they take turns on it, so nothing here is fast."""

from __future__ import annotations

import contextlib
import queue
import traceback
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.execution.graphs import CudaCapture
from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.parallel.ranks import Follower, load_engine
from cortex.neuron.engine.request import EngineRequest, LoadSpec, RankSpec, SamplingParams
from cortex.neuron.kernels.peer_exchange import BUFFER_BYTES, MAX_BYTES, peer_sum_reference

from ...rank_threads import run, tokens_of
from ...small_llama import write_small_llama

pytestmark = pytest.mark.gpu

NUM_RANKS = 2
TIMEOUT_S = 100.0
DEVICE = torch.device("cuda:0")
SPEC = LoadSpec("", dtype="bfloat16", max_num_seqs=4, context_tokens=256, memory_bytes=64 << 20)


def part_of(rank: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + rank)
    return torch.randn((rows, columns), generator=generator).to(DEVICE, dtype)


def requests(max_tokens: int = 24) -> list[EngineRequest]:
    greedy, seeded = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=7, top_k=20)
    prompt = tuple(range(5, 75))
    return [
        EngineRequest("greedy", prompt, max_tokens=max_tokens, sampling=greedy),
        EngineRequest("seeded", prompt[:33], max_tokens=max_tokens, sampling=seeded),
    ]


class Ranks:
    """Runs `target` with (rank, directory, plans of each rank) in processes; returns what each of them returned."""

    def __init__(self, target: Any, directory: Path, *arguments: Any) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._results: Queue[tuple[int, Any]] = context.Queue()
        plans = [context.SimpleQueue() for _ in range(NUM_RANKS)]
        self._processes = [
            context.Process(target=_run, args=(target, rank, str(directory), plans, self._results, *arguments))
            for rank in range(NUM_RANKS)
        ]
        for process in self._processes:
            process.start()

    def results(self) -> list[Any]:
        found: dict[int, Any] = {}
        try:
            while len(found) < NUM_RANKS:
                rank, result = self._results.get(timeout=TIMEOUT_S)
                found[rank] = result
                assert not isinstance(result, str), result
        except queue.Empty:
            pytest.fail(f"only ranks {sorted(found)} ended within {TIMEOUT_S:.0f} s")
        finally:
            for process in self._processes:
                process.kill()
        return [found[rank] for rank in range(NUM_RANKS)]


def _run(target: Any, rank: int, directory: str, plans: Any, results: Any, *arguments: Any) -> None:
    torch.cuda.set_device(DEVICE)
    try:
        results.put((rank, target(rank, directory, plans, *arguments)))
    except BaseException:  # noqa: BLE001 - shown by the test
        results.put((rank, traceback.format_exc()))


def exchange(rank: int, directory: str, plans: Any) -> list[list[float]]:
    """The largest error of each call: a sum and a gather, called, captured, and replayed."""
    del plans
    group = TorchGroup.join(RankSpec(rank, NUM_RANKS, directory), DEVICE, lambda: None)
    assert group.uses_peers
    assert group.num_bytes == BUFFER_BYTES
    errors = []
    for rows, columns, dtype in ((1, 4096, torch.bfloat16), (3, 77, torch.float16), (8, 8192, torch.float32)):
        assert rows * columns * dtype.itemsize <= MAX_BYTES
        parts = [part_of(each, rows, columns, dtype) for each in range(NUM_RANKS)]
        expected = (peer_sum_reference(parts), torch.cat(parts, dim=-1), parts[0])

        def step(own: Tensor = parts[rank]) -> tuple[Tensor, Tensor, Tensor]:
            return group.all_reduce(own.clone()), group.all_gather(own), group.broadcast(own.clone())

        outputs = [tensor.clone() for tensor in step()]
        graph, captured = CudaCapture(is_divided=True)(step)
        for _ in range(5):
            for tensor in captured:
                tensor.zero_()
            graph.replay()
            outputs += [tensor.clone() for tensor in captured]
        wanted = expected * (len(outputs) // 3)
        errors.append([(a.float() - b.float()).abs().max().item() for a, b in zip(outputs, wanted, strict=True)])
    large = torch.ones(MAX_BYTES, dtype=torch.float32, device=DEVICE)
    errors.append([(group.all_reduce(large) - NUM_RANKS).abs().max().item()])  # through the library
    group.close()
    return errors


def test_processes_share_memory(tmp_path: Path) -> None:
    for errors in Ranks(exchange, tmp_path).results():
        assert not any(error for call in errors for error in call), errors


class QueueLink:
    def __init__(self, plans: Any) -> None:
        self._plans = plans

    def follow_others(self) -> None: ...

    def turn(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def announce(self, plan: Any) -> None:
        for each in self._plans:
            each.put(plan)


def serve(rank: int, directory: str, plans: Any, path: str) -> tuple[int, list[dict[str, list[int]]]]:
    """How many graphs this rank has, and the responses with graphs, asleep and awake again."""
    spec = replace(SPEC, path=path, rank=RankSpec(rank, NUM_RANKS, directory))
    link = QueueLink(plans[1:]) if rank == 0 else None
    engine = load_engine(spec, DEVICE, lambda *_: None, lambda: False, link)
    if isinstance(engine, Follower):
        while (plan := plans[rank].get()) is not None:
            if plan == "sleep":
                engine.sleep()
            elif plan == "wake":
                engine.wake(lambda *_: None)
            else:
                engine.follow(plan)
        count = len(engine._following._graphs._captured)  # type: ignore[union-attr]
        engine.close()
        return count, []
    while engine.prepare():
        pass
    count = len(engine._loop._runner._graphs._captured)  # type: ignore[union-attr]
    answers = [{name: tokens_of(each) for name, each in run(engine, *requests()).items()}]
    engine.sleep()
    plans[1].put("sleep")
    plans[1].put("wake")
    engine.wake(lambda *_: None)
    while engine.prepare():
        pass
    answers.append({name: tokens_of(each) for name, each in run(engine, *requests()).items()})
    plans[1].put(None)
    engine.close()
    return count, answers


def test_divided_model_replays_graphs_with_its_messages(tmp_path: Path) -> None:
    path = write_small_llama(tmp_path)
    (tmp_path / "ranks").mkdir()
    (leading, answers), (following, _) = Ranks(serve, tmp_path / "ranks", str(path)).results()
    assert leading == following == 3  # sizes 1, 2 and 4
    assert answers[0] == answers[1]
    whole = Engine.load(replace(SPEC, path=str(path)), DEVICE, lambda *_: None, lambda: False)
    expected = {name: tokens_of(each) for name, each in run(whole, *requests()).items()}
    whole.close()
    print(expected["greedy"], answers[0]["greedy"], sep="\n")
    assert answers[0]["greedy"][:3] == expected["greedy"][:3]  # later ones may differ by rounding


def test_library_is_captured_too(tmp_path: Path) -> None:
    """A group of one rank: NCCL rejects two on one card."""
    group = TorchGroup.join(RankSpec(0, 1, str(tmp_path), "nccl"), DEVICE, lambda: None)
    own = torch.ones(1 << 20, device=DEVICE)
    out = torch.zeros_like(own)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        out.add_(group.all_reduce(own.clone()))
        return out, out, out

    graph, _ = CudaCapture(is_divided=True)(step)
    out.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert out.eq(3).all()
    del graph
    group.close()
