"""A divided model as an engine: the leader serves requests, the other ranks follow."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import GroupBroken, LoadCancelled, LoadError
from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.parallel.ranks import load_engine
from cortex.neuron.engine.request import EngineRequest, LoadSpec, RankSpec, SamplingParams

from ....waiting import WAIT_S, wait_until
from ...engine_runs import run, tokens_of
from ...models.reference_models import randomised
from ...rank_threads import QueueLink, RankThreads
from ...tiny_models import tiny_delta, tiny_sizes

SIZES: dict[str, Any] = {
    **tiny_sizes(vocab_size=97, hidden_size=48, intermediate_size=80, head_dim=16),
    **tiny_delta(linear_key_head_dim=12, linear_value_head_dim=10),
    "layer_types": ["linear_attention", "full_attention"],
}


def write_hybrid(folder: Path) -> Path:
    """A model with attention and recurrent layers."""
    config = transformers.Qwen3_5TextConfig(**SIZES)
    model = randomised(lambda: transformers.Qwen3_5ForCausalLM(config), std=0.12, vector_std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("model"))


def specs(path: Path) -> list[LoadSpec]:
    """The ranks are offered different amounts of memory: they must agree on one plan."""
    whole = LoadSpec(str(path), dtype="float32", max_num_seqs=4)
    return [replace(whole, memory_bytes=(200 + 20 * rank) << 10) for rank in range(2)]


@pytest.fixture
def pair(path: Path, tmp_path: Path) -> Iterator[RankThreads]:
    pair = RankThreads(specs(path), tmp_path)
    yield pair
    pair.close()


def requests() -> list[EngineRequest]:
    greedy, seeded = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=7, top_k=20)
    prompt = tuple(range(5, 75))
    return [
        EngineRequest("greedy", prompt, max_tokens=12, sampling=greedy),
        EngineRequest("seeded", prompt[:33], max_tokens=9, sampling=seeded),
        EngineRequest("short", (3,), max_tokens=6, sampling=greedy),
        EngineRequest("scored", prompt[:40], max_tokens=2, sampling=greedy, prompt_logprobs=0),
    ]


def test_divided_model_draws_the_same_tokens_as_one_device(pair: RankThreads, path: Path) -> None:
    whole = Engine.load(LoadSpec(str(path), dtype="float32", max_num_seqs=4), "cpu", lambda *_: None, lambda: False)
    expected = run(whole, *requests())
    whole.close()
    for _ in range(3):  # then from the prefix cache, and with a copied page and the state before the last token
        outputs = run(pair.leader, *requests())
        assert {name: tokens_of(each) for name, each in outputs.items()} == {
            name: tokens_of(each) for name, each in expected.items()
        }
    assert outputs["greedy"][0].cached_tokens == 69
    scores, expected_scores = (each["scored"][0].prompt_logprobs for each in (outputs, expected))
    assert [one.logprob for one in scores] == pytest.approx([one.logprob for one in expected_scores], abs=1e-4)
    assert pair.leader.info.num_pages == pair.follower.info.num_pages
    assert any("another device of the model has less memory" in note for note in pair.follower.info.notes)
    pair.leader.check_integrity()


def test_rank_begins_no_step_of_its_own_while_the_leader_waits_for_it_to_connect(tmp_path: Path) -> None:
    """Such a step would wait for the devices that the leader has locked."""
    is_locked, waits = threading.Event(), threading.Event()
    steps_begun: list[bool] = []

    @contextlib.contextmanager
    def turn() -> Iterator[None]:
        is_locked.set()
        waits.clear()
        assert waits.wait(WAIT_S), "the other rank waits until it may connect"
        yield
        is_locked.clear()

    def join(rank: int) -> TorchGroup:
        return TorchGroup.join(
            RankSpec(rank, 2, str(tmp_path)),
            torch.device("cpu"),
            poll=lambda: steps_begun.append(is_locked.is_set()),
            follow=waits.set,
            turn=turn() if rank == 0 else None,
        )

    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(join, 1)
        wait_until(lambda: steps_begun or second.done())
        first = threads.submit(join, 0)
        for group in (first.result(WAIT_S), second.result(WAIT_S)):
            group.close()
    assert steps_begun
    assert not any(steps_begun)


def test_rank_that_fails_while_it_connects_ends_the_wait_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_reduce = TorchGroup.all_reduce

    def broken_after_the_first(group: TorchGroup, partial: torch.Tensor) -> torch.Tensor:
        if not group.shard.is_first:
            raise LoadError("the links are broken")
        return all_reduce(group, partial)

    monkeypatch.setattr(TorchGroup, "all_reduce", broken_after_the_first)
    with ThreadPoolExecutor(2) as threads:
        first, second = (
            threads.submit(TorchGroup.join, RankSpec(rank, 2, str(tmp_path)), torch.device("cpu"), lambda: None)
            for rank in range(2)
        )
        with pytest.raises(LoadError, match="the links are broken"):
            second.result(WAIT_S)
        with pytest.raises(LoadCancelled, match="another rank of the model ended its load"):
            first.result(WAIT_S)


def test_leader_sleeps_and_wakes_after_and_before_the_others(pair: RankThreads) -> None:
    before = tokens_of(run(pair.leader, requests()[0])["greedy"])
    pair.leader.sleep()
    pair.follower.sleep()
    pair.follower.wake(lambda *_: None)
    pair.leader.wake(lambda *_: None)
    assert tokens_of(run(pair.leader, requests()[0])["greedy"]) == before


def test_step_fails_for_good_when_a_rank_is_gone(path: Path, tmp_path: Path) -> None:
    pair = RankThreads(specs(path), tmp_path)
    pair.end_followers()
    pair.leader.submit(requests()[0])
    with pytest.raises(GroupBroken):
        pair.leader.step()
    pair.leader.close()


def test_rank_that_waits_for_others_can_be_cancelled(path: Path, tmp_path: Path) -> None:
    spec = LoadSpec(str(path), dtype="float32", rank=RankSpec(0, 2, str(tmp_path)))
    polls: list[str] = []
    with pytest.raises(LoadCancelled):
        load_engine(spec, "cpu", lambda stage, *_: polls.append(stage), lambda: len(polls) > 2, QueueLink())
