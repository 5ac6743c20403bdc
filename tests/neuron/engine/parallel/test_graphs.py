"""A divided model captures and replays its steps on all ranks together: with a capture that replays on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.engine.errors import GroupBroken
from cortex.neuron.engine.execution import runner
from cortex.neuron.engine.execution.graphs import (
    CAPTURE_AFTER_MISSES,
    DRAFT_SIZES,
    NotCaptured,
    Outputs,
    max_captured_rows,
)
from cortex.neuron.engine.parallel import group as group_module
from cortex.neuron.engine.parallel.group import TorchGroup, captured_bytes
from cortex.neuron.engine.parallel.peer_memory import may_share
from cortex.neuron.engine.request import EngineRequest, LoadSpec, RankSpec, SamplingParams
from cortex.neuron.kernels.jit import TRITON
from cortex.neuron.kernels.peer_buffer import MAX_BYTES, MAX_RANKS
from cortex.neuron.layers.parallel import UNLIMITED_BYTES

from ....waiting import WAIT_S
from ...engine_runs import run, tokens_of
from ...rank_threads import RankThreads
from ...tiny_models import write_llama

MAX_ROWS = 3


class Captures:
    """The captures of all ranks. A replay computes the step again, into the outputs of its capture."""

    def __init__(self) -> None:
        self.sizes: dict[bool, list[int]] = {True: [], False: []}
        """Sizes that the leader captured, and those of the other rank."""
        self.replays = 0
        self.fails: tuple[bool, int, Exception] | None = None
        """Whether the leader's capture fails, or the other's; of which size; with what."""

    def new(
        self, *_: object, is_batch_invariant: bool = False
    ) -> Callable[[Callable[[], Outputs]], tuple[Any, Outputs]]:
        leads = threading.current_thread() is threading.main_thread()

        def capture(step: Callable[[], Outputs]) -> tuple[Any, Outputs]:
            outputs = step()
            if self.fails is not None and self.fails[:2] == (leads, len(outputs[0])):
                raise self.fails[2]
            self.sizes[leads].append(len(outputs[0]))
            return _Replay(self, step, outputs), outputs

        return capture


class _Replay:
    def __init__(self, captures: Captures, step: Callable[[], Outputs], outputs: Outputs) -> None:
        self._captures, self._step, self._outputs = captures, step, outputs

    def replay(self, rows: int) -> None:
        self._captures.replays += 1
        for kept, new in zip(self._outputs, self._step(), strict=True):
            kept.copy_(new)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"), std=0.1, hidden_size=256, intermediate_size=512)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    captures = Captures()
    monkeypatch.setattr(runner, "default_capture", captures.new)
    monkeypatch.setattr(TorchGroup, "max_captured_bytes", UNLIMITED_BYTES)
    return captures


def ranks(path: Path, directory: Path) -> RankThreads:
    return RankThreads([LoadSpec(str(path), dtype="float32", max_num_seqs=MAX_ROWS)] * 2, directory)


def requests(max_tokens: int = 12) -> list[EngineRequest]:
    greedy, seeded = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=7, top_k=20)
    prompt = tuple(range(5, 40))
    return [
        EngineRequest("greedy", prompt, max_tokens=max_tokens, sampling=greedy),
        EngineRequest("seeded", prompt[:9], max_tokens=max_tokens - 3, sampling=seeded),
        EngineRequest("short", (3,), max_tokens=max_tokens - 6, sampling=greedy),
    ]


def responses(pair: RankThreads, max_tokens: int = 12) -> dict[str, list[int]]:
    return {name: tokens_of(outputs) for name, outputs in run(pair.leader, *requests(max_tokens)).items()}


def test_graphs_of_all_ranks_draw_the_same_tokens_as_steps_without(
    path: Path, tmp_path: Path, captures: Captures
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchGroup, "max_captured_bytes", 0)
        plain = ranks(path, tmp_path)
        expected = responses(plain)
        plain.close()
    assert captures.replays == 0
    (tmp_path / "second").mkdir()
    pair = ranks(path, tmp_path / "second")
    assert captures.sizes == {True: [1], False: [1]}  # with the load
    while pair.leader.prepare():
        pass
    sizes = sorted([1, 2, 3, *DRAFT_SIZES])
    assert captures.sizes == {True: sizes, False: sizes}
    assert not pair.follower.prepare()
    assert responses(pair) == expected
    assert captures.replays > 0
    pair.leader.sleep()
    pair.follower.sleep()
    pair.follower.wake(lambda *_: None)
    pair.leader.wake(lambda *_: None)
    assert responses(pair) == expected
    assert sorted(captures.sizes[True] + captures.sizes[False]) == sorted([1, 1, *sizes, *sizes])
    pair.close()
    assert not pair.errors


def test_all_ranks_capture_between_steps_after_as_many_misses(path: Path, tmp_path: Path, captures: Captures) -> None:
    pair = ranks(path, tmp_path)
    responses(pair, max_tokens=CAPTURE_AFTER_MISSES + 12)
    pair.close()
    assert captures.sizes[True] == captures.sizes[False]
    assert 3 in captures.sizes[True]
    assert not pair.errors


@pytest.mark.parametrize("leads", [True, False])
def test_no_rank_has_a_graph_that_one_could_not_capture(
    path: Path, tmp_path: Path, captures: Captures, *, leads: bool
) -> None:
    captures.fails = (leads, 2, NotCaptured())
    pair = ranks(path, tmp_path)
    before = responses(pair)
    while pair.leader.prepare():
        pass
    replays = captures.replays
    assert responses(pair) == before
    assert captures.replays > replays  # of the graph that they have
    pair.close()
    assert captures.sizes == {leads: [1], not leads: [1, 2]}
    assert not pair.errors


def test_rank_without_memory_in_the_middle_of_a_capture_ends_the_model(
    path: Path, tmp_path: Path, captures: Captures
) -> None:
    captures.fails = (True, 2, torch.OutOfMemoryError())
    pair = ranks(path, tmp_path)
    with pytest.raises(GroupBroken):
        pair.leader.prepare()
    pair.leader.close()  # as a dying process does
    pair.end_followers()
    assert isinstance(pair.errors[1], GroupBroken)


@pytest.mark.parametrize("incapable", [{0}, {1}, {0, 1}, set()])
def test_ranks_connect_again_if_the_library_cannot_be_captured_on_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, incapable: set[int]
) -> None:
    monkeypatch.setattr(group_module, "can_capture", lambda group, _: group.shard.rank not in incapable)
    barrier = threading.Barrier(2)
    outcomes = ["", ""]

    def exchange(rank: int, outcome: str) -> list[str]:
        outcomes[rank] = outcome
        barrier.wait(WAIT_S)
        return outcomes

    def total(rank: int) -> tuple[int, float]:
        spec, device = RankSpec(rank, 2, str(tmp_path)), torch.device("cpu")
        group = TorchGroup.join(spec, device, lambda: None)
        group.captures_library = True
        group.agree_on_capture(spec, device, lambda _, outcome: exchange(rank, outcome))
        summed = group.all_reduce(torch.ones(1)).item()
        max_bytes = group.max_captured_bytes
        barrier.wait(WAIT_S)
        group.close()
        return max_bytes, summed

    with ThreadPoolExecutor(2) as threads:
        expected = (0 if incapable else UNLIMITED_BYTES, 2.0)
        assert list(threads.map(total, range(2), timeout=WAIT_S)) == [expected] * 2


@pytest.mark.parametrize(
    ("captures_library", "uses_peers", "expected"),
    [(True, True, UNLIMITED_BYTES), (True, False, UNLIMITED_BYTES), (False, True, MAX_BYTES), (False, False, 0)],
)
def test_messages_through_the_host_are_not_captured(*, captures_library: bool, uses_peers: bool, expected: int) -> None:
    assert captured_bytes(captures_library=captures_library, uses_peers=uses_peers) == expected


@pytest.mark.parametrize(
    ("max_rows", "row_elements", "max_bytes", "expected"),
    [(64, 4096, UNLIMITED_BYTES, 64), (64, 4096, 256 << 10, 16), (64, 1 << 20, 256 << 10, 0), (64, 4096, 0, 0)],
)
def test_graphs_have_no_more_rows_than_their_messages_allow(
    max_rows: int, row_elements: int, max_bytes: int, expected: int
) -> None:
    assert max_captured_rows(max_rows, row_elements, max_bytes) == expected


@pytest.mark.skipif(not TRITON, reason="needs Triton")
@pytest.mark.parametrize(
    ("size", "device_kind", "environment", "expected"),
    [
        (2, "cuda", {}, True),
        (MAX_RANKS, "cuda", {"NCCL_P2P_DISABLE": "0"}, True),
        (MAX_RANKS + 1, "cuda", {}, False),
        (1, "cuda", {}, False),
        (2, "cpu", {}, False),
        (2, "cuda", {"NCCL_P2P_DISABLE": "1"}, False),
    ],
)
def test_ranks_on_gpus_of_one_host_share_memory(
    *, size: int, device_kind: str, environment: dict[str, str], expected: bool
) -> None:
    assert may_share(RankSpec(0, size, ""), device_kind, environment) is expected
