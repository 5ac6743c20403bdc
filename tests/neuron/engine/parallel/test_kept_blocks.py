"""Pages and states of a divided model in host memory: each rank has its part, and a prefix is used if all have it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cortex.neuron.engine.host_pages.copies import BlockCopies, BlockTensors, RunningCopy
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.parallel.ranks import FollowingBlocks
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams, StageSpec
from cortex.neuron.engine.scheduling.step_plan import BlockOrder, NamedBlocks, StepPlan
from cortex.neuron.layers.configs import Shard

from ...engine_runs import run, tokens_of
from ...rank_threads import RankThreads
from ...tiny_models import write_llama
from ..host_pages.engines import new_host
from .test_ranks import write_hybrid
from .test_stages import load_whole, whole_spec, write_family

PROMPT = tuple(index * 7 % 83 + 3 for index in range(110))
DIVISIONS: list[tuple[str, tuple[int, ...]]] = [
    ("dense", ()),  # in every layer
    ("hybrid", ()),
    ("llama", (3, 2)),
    ("windows", (2, 1, 2)),  # the second stage has no window
    ("qwen3_5", (1, 4)),  # the first stage has no attention
    ("qwen3_next", (2, 1, 2)),  # the second stage has no recurrent layer
]


def written(family: str, folder: Path) -> str:
    folder.mkdir()
    if family == "dense":
        return str(write_llama(folder))
    return str(write_hybrid(folder)) if family == "hybrid" else write_family(family, folder)


def specs(path: str, layers: Sequence[int]) -> list[LoadSpec]:
    """Two ranks that divide every layer, or stages."""
    whole = replace(whole_spec(path), model_id="m")
    stages = tuple(StageSpec(sum(layers[:rank]), count) for rank, count in enumerate(layers))
    return [replace(whole, stages=stages)] * (len(layers) or 2)


@contextmanager
def loaded(
    specs: Sequence[LoadSpec], folder: Path, hosts: Sequence[DeviceHostMemory | None] | None = None
) -> Iterator[RankThreads]:
    """The ranks, whose pages are saved in the end."""
    folder.mkdir()
    ranks = RankThreads(specs, folder, hosts)
    try:
        yield ranks
        ranks.leader.check_integrity()
        ranks.leader.save_pages()
    finally:
        ranks.close()
    assert not ranks.errors


def respond(ranks: RankThreads, prompt: tuple[int, ...] = PROMPT, tenant: bytes = b"") -> tuple[list[int], int, int]:
    """Greedy tokens, how many of the prompt were cached, and how many of these came from host memory."""
    before = ranks.leader.stats().fetched_tokens
    request = EngineRequest("r", prompt, 4, SamplingParams(temperature=0.0), checkpoint_at=(64,), tenant=tenant)
    outputs = run(ranks.leader, request)["r"]
    fetched = ranks.leader.stats().fetched_tokens - before
    return tokens_of(outputs), sum(each.cached_tokens or 0 for each in outputs), fetched


@pytest.mark.parametrize(("family", "layers"), DIVISIONS, ids=str)
def test_conversation_survives_the_unload_of_a_divided_model_for_its_tenant(
    family: str, layers: tuple[int, ...], tmp_path: Path
) -> None:
    path = written(family, tmp_path / "model")
    whole = load_whole(path)
    outputs = run(whole, EngineRequest("r", PROMPT, 4, SamplingParams(temperature=0.0), checkpoint_at=(64,)))["r"]
    expected = tokens_of(outputs)
    whole.close()
    hosts = [new_host() for _ in layers or range(2)]
    with loaded(specs(path, layers), tmp_path / "first", hosts) as ranks:
        assert respond(ranks) == (expected, 0, 0)
    assert all(len(host.store) for host in hosts)
    with loaded(specs(path, layers), tmp_path / "again", hosts) as ranks:
        assert respond(ranks, tenant=b"of another one..") == (expected, 0, 0)
        tokens, cached, fetched = respond(ranks)
        assert tokens == expected
        assert cached == fetched == 96
    for host in hosts:
        host.store.check_integrity()
        assert not any(slab.num_copies for slab in host.store._slabs.values())  # noqa: SLF001 - nothing stays locked
        assert host.kept()["m"].num_bytes > 0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_llama(tmp_path_factory.mktemp("model")))


def lose_pages(host: DeviceHostMemory, count: int) -> None:
    """Drops the pages of a prefix from its end."""
    known = list(host.store._slab_of)  # noqa: SLF001 - in the order in which they were kept
    for kind, digest in known[:count]:
        host.store.forget(kind, [digest])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("lost", "usable"), [(1, 64), (3, 0)])
def test_prefix_is_usable_as_far_as_all_ranks_have_it(
    path: str, tmp_path: Path, rank: int, lost: int, usable: int
) -> None:
    hosts = [new_host(), new_host()]
    with loaded(specs(path, ()), tmp_path / "first", hosts) as ranks:
        expected = respond(ranks)[0]
    lose_pages(hosts[rank], lost)
    with loaded(specs(path, ()), tmp_path / "again", hosts) as ranks:
        assert respond(ranks) == (expected, usable, usable)
    with loaded(specs(path, ()), tmp_path / "third", hosts) as ranks:
        assert respond(ranks) == (expected, 96, 96), "what was computed again is kept again, by all ranks"


def test_flipped_bit_of_one_rank_is_found_and_all_ranks_compute_the_page(path: str, tmp_path: Path) -> None:
    hosts = [new_host(), new_host()]
    with loaded(specs(path, ()), tmp_path / "first", hosts) as ranks:
        expected = respond(ranks)[0]
    (kind, digest), *_ = hosts[1].store._slab_of  # noqa: SLF001 - the last page: it was kept first
    found = hosts[1].store.checksum(kind, digest)
    assert found is not None
    hosts[1].slabs.rows(*found[0], 1, kind.num_bytes)[0, 3] ^= 1
    with loaded(specs(path, ()), tmp_path / "again", hosts) as ranks:
        assert respond(ranks) == (expected, 64, 64)


def test_ranks_without_the_same_pages_compute_the_prompt(path: str, tmp_path: Path) -> None:
    hosts = [new_host(), new_host()]
    with loaded(specs(path, ()), tmp_path / "first", hosts) as ranks:
        expected = respond(ranks)[0]
    others: dict[str, list[DeviceHostMemory | None]] = {
        "a rank has no host memory": [hosts[0], None],
        "a rank has no budget": [hosts[0], new_host(0)],
        "the ranks are on each other's devices": [hosts[1], hosts[0]],
    }
    for name, changed in others.items():
        with loaded(specs(path, ()), tmp_path / name, changed) as ranks:
            assert respond(ranks) == (expected, 0, 0), name


def change_layer(path: Path, layer: int) -> None:
    (file,) = path.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if f".layers.{layer}." in name and tensor.dim() == 2:
            tensors[name] = -tensor
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_weights_that_differ_on_one_rank_share_no_page_on_any(tmp_path: Path, layer: int) -> None:
    """What a stage computes follows from those before it."""
    stages, hosts = (2, 1, 2), [new_host() for _ in range(3)]
    first, other = written("llama", tmp_path / "model"), tmp_path / "other"
    shutil.copytree(first, other)
    change_layer(other, layer)
    with loaded(specs(first, stages), tmp_path / "first", hosts) as ranks:
        respond(ranks)
    num_kept = [len(host.store) for host in hosts]
    with loaded(specs(str(other), stages), tmp_path / "second", hosts) as ranks:
        expected, num_cached, _ = respond(ranks)
        assert num_cached == 0
    assert [len(host.store) for host in hosts] == [2 * count for count in num_kept]
    with loaded(specs(str(other), stages), tmp_path / "third", hosts) as ranks:
        assert respond(ranks) == (expected, 96, 96)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("family", "layers"), [("llama", (2, 1, 2)), ("qwen3_next", (2, 1, 2))], ids=str)
def test_all_ranks_compute_a_prefix_for_which_the_device_of_one_has_no_memory(
    family: str, layers: tuple[int, ...], tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hosts = written(family, tmp_path / "model"), [new_host() for _ in layers]
    with loaded(specs(path, layers), tmp_path / "first", hosts) as ranks:
        expected = respond(ranks)[0]
    to_device, failures = BlockCopies.to_device, list[int]()

    def without_memory(copies: BlockCopies, *arguments: Any) -> RunningCopy:
        if not failures and copies._slabs is hosts[rank].slabs:  # noqa: SLF001 - which rank it is
            failures.append(rank)
            raise torch.OutOfMemoryError
        return to_device(copies, *arguments)

    monkeypatch.setattr(BlockCopies, "to_device", without_memory)
    with loaded(specs(path, layers), tmp_path / "again", hosts) as ranks:
        assert respond(ranks) == (expected, 0, 0)
        assert failures == [rank]
        ranks.leader.check_integrity()
        assert respond(ranks, (*PROMPT, *expected))[1] >= 64, "what was computed is used"
    with loaded(specs(path, layers), tmp_path / "third", hosts) as ranks:
        assert respond(ranks) == (expected, 96, 96)
    for host in hosts:
        host.store.check_integrity()
        assert not any(slab.num_copies for slab in host.store._slabs.values())  # noqa: SLF001 - nothing stays locked


def test_step_ends_what_ranks_have_agreed_on(path: str, tmp_path: Path) -> None:
    hosts = [new_host(), new_host()]
    with loaded(specs(path, ()), tmp_path / "first", hosts) as ranks:
        respond(ranks)
    first = list(hosts[1].store._slab_of)[-1]  # noqa: SLF001 - it was kept last; without it the others are of no use
    hosts[1].store.forget(first[0], [first[1]])
    with loaded(specs(path, ()), tmp_path / "again", hosts) as ranks:
        respond(ranks)
        hosts[1].store.limit(0)
        assert hosts[1].store.num_bytes == 0


def test_nothing_is_asked_where_the_leader_has_nothing_to_offer(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[str] = []
    with loaded(specs(path, ()), tmp_path / "first", [new_host(), new_host()]) as ranks:
        announce = ranks.link.announce

        def recorded(plan: StepPlan | None) -> None:
            if plan is not None and plan.order is not None:
                announced.append(plan.order.action)
            announce(plan)

        monkeypatch.setattr(ranks.link, "announce", recorded)
        respond(ranks)
        respond(ranks)
        assert announced == [], "the device has the prefix"
        for _ in range(2):
            ranks.leader.save_pages()
            assert announced == ["name", "save", "ask"], "each block once; then all ranks have it"
        respond(ranks, tuple(reversed(PROMPT)))
        assert announced == ["name", "save", "ask"], "host memory has nothing of this prompt"


class Agreeing:
    """A group of which only this rank is asked."""

    shard = Shard(0, 1)

    def all_reduce(self, partial: Tensor) -> Tensor:
        self.votes = [bool(vote) for vote in partial[1:]]
        return partial


def test_blocks_that_ranks_have_agreed_on_stay_until_the_next_order() -> None:
    host, group = new_host(), Agreeing()
    memory = torch.arange(40, dtype=torch.int64).view(1, 10, 4)
    blocks = [BlockTensors([memory]), BlockTensors([])]
    kinds = host.kinds("", b"weights", [each.num_bytes for each in blocks], 1, 32)
    rank = FollowingBlocks(host, blocks, lambda _: kinds, 1, cast(TorchGroup, group), torch.device("cpu"))
    digests = (b"a", b"b", b"c")
    rank.obey(BlockOrder("keep", (NamedBlocks(0, (1, 2), digests[:2]), NamedBlocks(1, (3,), (b"c",)))))
    asked = (NamedBlocks(0, (), digests), NamedBlocks(1, (), digests[:1]))
    rank.obey(BlockOrder("ask", asked))
    assert group.votes == [True, True, False, True], "a part without memory here is with the other ranks"
    host.store.limit(0)
    assert host.store.num_bytes > 0, "the next order may fetch them"
    rank.obey(BlockOrder("fetch", (NamedBlocks(0, (8, 7), digests[:2]), NamedBlocks(1, (3,), (b"a",)))))
    assert memory[0, [8, 7]].equal(memory[0, [1, 2]])
    host.store.limit(0)
    assert host.store.num_bytes == 0
    host.store.limit(1 << 20)
    rank.obey(BlockOrder("keep", (NamedBlocks(0, (1,), (b"a",)),)))
    rank.obey(BlockOrder("forget", (NamedBlocks(0, (), (b"a",)),)))
    rank.obey(BlockOrder("ask", asked))
    assert group.votes == [False, False, False, True]
    rank.let_go()
    host.store.check_integrity()
