"""Loads a model, or one rank of a divided one: the leader, which is an engine like any other, or a follower. Each rank
keeps its own part of the blocks in host memory, under the same digests.

The leader decides which blocks are kept and fetched, and announces it. Before a prefix is used, all ranks agree on the
blocks that every rank has; all ranks compute the others. Ranks hold the agreed blocks until the leader's next order or
step, so that none goes missing. They also agree on whether each has copied its part: if one device lacks memory, all
ranks compute.

A rank's results depend on the weights of all ranks, so blocks are named by all of them: see `name_of_all`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import GroupBroken, LoadCancelled, RequestError
from cortex.neuron.engine.execution.runner import Runner
from cortex.neuron.engine.host_pages.copies import BlockCopies, BlockTensors
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.outgoing import OutgoingBlocks
from cortex.neuron.engine.host_pages.store import BlockKind, BlockPlace
from cortex.neuron.engine.host_pages.tier import OtherRanks
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.loading.filling import Progress
from cortex.neuron.engine.loading.loading import LoadedModel, load_model
from cortex.neuron.engine.parallel.group import TorchGroup, poller
from cortex.neuron.engine.parallel.steps import (
    FirstStageRunner,
    FollowingRunner,
    LaterStageRunner,
    LeadingRunner,
    RankLink,
    StepLink,
)
from cortex.neuron.engine.pooling.engine import PoolingEngine
from cortex.neuron.engine.request import EngineRequest, LoadSpec, RankSpec
from cortex.neuron.engine.scheduling.step_plan import BlockAction, BlockOrder, NamedBlocks, StepPlan
from cortex.neuron.models.pooling.model import PooledModel


class LeadingBlocks:
    """The leader's orders to the other ranks (the `OtherRanks` of its tier). Belongs to the engine thread; every call
    raises GroupBroken."""

    def __init__(
        self, link: StepLink, group: TorchGroup, device: torch.device, ensure_named: Callable[[], object]
    ) -> None:
        """`ensure_named`: after it the ranks have names for their blocks."""
        self._link = link
        self._group = group
        self._device = device
        self._ensure_named = ensure_named
        self._is_settled = True

    def keep(self, blocks: NamedBlocks, *, may_wait: bool) -> None:
        """Each rank copies its part of these blocks to host memory while it has room. `may_wait`: the model has no
        work, so it may take time to get more room."""
        self._ensure_named()
        self._is_settled = False
        self._announce("save" if may_wait else "keep", (blocks,))

    def fetch(self, blocks: Sequence[NamedBlocks]) -> bool:
        """Each rank copies its part of blocks that all ranks have to the device, before the next step. False if a rank
        has no memory for its copy; then no rank may use these blocks."""
        with self._link.turn():
            self._announce("fetch", blocks)
            return all(_agreed(self._group, [True], self._device))

    def forget(self, digests: Sequence[Digest]) -> None:
        self._announce("forget", [NamedBlocks(0, (), tuple(digests))])

    def held(self, wanted: Sequence[NamedBlocks]) -> list[list[bool]]:
        """Which of these blocks, which the leader has, all other ranks have too."""
        self._ensure_named()
        self._is_settled = True
        with self._link.turn():
            self._announce("ask", wanted)
            sums = _agreed(self._group, [True] * _count(wanted), self._device)
        votes = iter(sums)
        return [[next(votes) for _ in blocks.digests] for blocks in wanted]

    def settle(self) -> None:
        """Returns when all ranks have carried out their orders."""
        if not self._is_settled:
            self.held(())

    def _announce(self, action: BlockAction, blocks: Sequence[NamedBlocks]) -> None:
        self._link.announce(_plan(action, blocks))


class FollowingBlocks:
    """The blocks of a following rank, which obeys the leader's orders. Belongs to the engine thread."""

    def __init__(
        self,
        host: DeviceHostMemory | None,
        blocks: Sequence[BlockTensors],
        new_kinds: Callable[[DeviceHostMemory], tuple[BlockKind, ...]],
        num_groups: int,
        group: TorchGroup,
        device: torch.device,
    ) -> None:
        """`host`: None if this rank keeps nothing. `new_kinds`: names the blocks in it. `num_groups`: the
        number of KV groups, whose pages come first in `blocks`; then the states."""
        self._host = host
        self._blocks = blocks
        self._kinds = () if host is None else new_kinds(host)
        self._num_groups = num_groups
        self._group = group
        self._device = device
        self._copies = None if host is None else BlockCopies(host.slabs, device)
        self._outgoing: list[OutgoingBlocks] = []
        self._held: dict[tuple[int, Digest], BlockPlace] = {}
        """The blocks that the ranks agreed on last."""

    def before_step(self, plan: StepPlan) -> None:
        """Releases the agreed blocks, and makes the step wait for copies of blocks that it overwrites."""
        self.let_go()
        for outgoing in self._outgoing:
            outgoing.precede(plan)

    def obey(self, order: BlockOrder) -> None:
        """Raises GroupBroken."""
        self.collect()
        if order.action == "fetch":
            _agreed(self._group, [self._fetch(order.blocks)], self._device)
        self.let_go()
        if order.action in ("keep", "save"):
            self._keep(order.blocks, may_wait=order.action == "save")
        elif order.action == "forget" and self._host is not None:
            for kind in self._kinds:
                self._host.store.forget(kind, order.blocks[0].digests)
        elif order.action == "ask":
            _agreed(self._group, self._hold(order.blocks), self._device)

    def _keep(self, wanted: Sequence[NamedBlocks], *, may_wait: bool) -> None:
        if self._host is not None:
            self._host.slabs.may_wait = may_wait
        for part, ids, digests in wanted:
            if self._host is None or self._copies is None or not self._has_blocks(part):
                continue
            store, kind = self._host.store, self._kinds[part]
            lacking = [(id, digest) for id, digest in zip(ids, digests, strict=True) if not store.has(kind, digest)]
            group = part if part < self._num_groups else None
            outgoing = OutgoingBlocks.start(self._copies, self._blocks[part], kind, group, lacking, store)
            if outgoing is not None:
                self._outgoing.append(outgoing)

    def _hold(self, wanted: Sequence[NamedBlocks]) -> list[bool]:
        """Which of these blocks are here; they stay until the next order."""
        votes = []
        for part, _, digests in wanted:
            if self._host is None or not self._has_blocks(part):
                votes += [self._host is not None] * len(digests)
                continue
            store, kind = self._host.store, self._kinds[part]
            self._host.drop_damaged([kind], digests)
            found = [digest for digest in digests if store.has(kind, digest)]
            self._held |= {
                (part, digest): place for digest, place in zip(found, store.borrow(kind, found), strict=True)
            }
            votes += [(part, digest) in self._held for digest in digests]
        return votes

    def _fetch(self, wanted: Sequence[NamedBlocks]) -> bool:
        """Whether this rank has copied its part; false if the device has no memory for it."""
        for part, ids, digests in wanted:
            if self._copies is not None and self._has_blocks(part):
                places = [self._held[part, digest] for digest in digests]
                try:
                    self._copies.to_device(self._blocks[part], ids, places).wait()
                except torch.OutOfMemoryError:
                    return False
        return True

    def collect(self) -> None:
        """Waits for the copies to host memory and offers their blocks."""
        for outgoing in self._outgoing:
            outgoing.copy.wait()
            assert self._host is not None
            outgoing.publish(self._host)
        self._outgoing = []

    def let_go(self) -> None:
        """Releases the agreed blocks."""
        if self._host is not None:
            self._host.store.end(tuple(self._held.values()))
        self._held = {}

    def _has_blocks(self, part: int) -> bool:
        """Whether layers of this rank have blocks of this part."""
        return self._blocks[part].num_bytes > 0


def name_together(link: StepLink, group: TorchGroup, own: bytes, device: torch.device) -> bytes:
    """Announce `name_of_all` to the other ranks and take part in it; the leader calls this."""
    with link.turn():
        link.announce(_plan("name", ()))
        return name_of_all(group, own, device)


def name_of_all(group: TorchGroup, own: bytes, device: torch.device) -> bytes:
    """A name for the blocks of this rank that holds for the same weights on all ranks; `own` holds for its own weights,
    and differs from rank to rank. All of them call it together."""
    octets = torch.tensor(list(own), dtype=torch.float32, device=device)
    sums = [int(total) for total in group.all_reduce(octets).tolist()]
    return hashlib.blake2b(own + repr(sums).encode(), digest_size=len(own)).digest()


def _plan(action: BlockAction, blocks: Sequence[NamedBlocks]) -> StepPlan:
    return StepPlan((), 0, (), (), order=BlockOrder(action, tuple(blocks)))


def _count(wanted: Sequence[NamedBlocks]) -> int:
    return sum(len(blocks.digests) for blocks in wanted)


def _agreed(group: TorchGroup, votes: Sequence[bool], device: torch.device) -> list[bool]:
    """The blocks for which all ranks vote. All ranks call it together, with the same number of votes."""
    sums = group.all_reduce(torch.tensor([True, *votes], dtype=torch.float32, device=device)).tolist()
    return [total == group.shard.size for total in sums[1:]]


def load_engine(
    spec: LoadSpec,
    device: torch.device | str,
    progress: Progress,
    cancelled: Callable[[], bool],
    link: RankLink | None = None,
) -> Engine:
    """`link`: of a rank of a divided model to the others; a `StepLink` if it leads.

    Raises LoadError or LoadCancelled, and then leaves nothing on the device.
    """
    if spec.rank is None:
        loaded = load_model(spec, torch.device(device), progress, cancelled)
        kind = PoolingEngine if isinstance(loaded.body, PooledModel) else Engine
        return kind.start(loaded, spec, progress, cancelled)
    return _load_rank(spec, spec.rank, torch.device(device), progress, cancelled, link)


def _load_rank(
    spec: LoadSpec,
    rank: RankSpec,
    device: torch.device,
    progress: Progress,
    cancelled: Callable[[], bool],
    link: RankLink | None,
) -> Engine:
    leading = cast(StepLink, link) if rank.rank == 0 else None
    poll = poller(partial(progress, "resolve", 0, 0), cancelled)
    follow = None if link is None else poller(link.follow_others, cancelled)
    turn = None if leading is None else leading.turn()
    group = TorchGroup.join(rank, device, poll, follow, turn, with_peers=not spec.stages)  # stages send to one another
    engine: Leader | Follower
    with contextlib.ExitStack() as failing:
        failing.callback(group.close)  # a rank that waits for this one fails at once
        try:
            loaded = load_model(spec, device, progress, cancelled, group)
            failing.callback(loaded.release)
            loaded.compiled(progress, cancelled)
            if leading is None:
                group.reached("loaded")
                engine = Follower(loaded, spec, group)
            else:
                group.wait_for_all("loaded")
                engine = Leader(loaded, spec, group, leading)
                progress("warm", 0, 0)
                engine.warm_up()
        except GroupBroken as error:
            raise LoadCancelled(f"another rank of the model ended its load: {error}") from error
        failing.pop_all()
    return engine


class Rank(Engine):
    """One rank of a divided model."""

    def __init__(self, loaded: LoadedModel, spec: LoadSpec, group: TorchGroup) -> None:
        self._group = group
        # A step ends on all ranks before the next one: other models that share a device must get their turn between.
        super().__init__(loaded, spec, overlaps=False)

    @property
    def _names_alone(self) -> bool:
        return False

    def close(self) -> None:
        super().close()
        self._group.close()


class Leader(Rank):
    """The first rank: plans, draws, and serves the requests of the whole model."""

    def __init__(self, loaded: LoadedModel, spec: LoadSpec, group: TorchGroup, link: StepLink) -> None:
        self._link = link
        super().__init__(loaded, spec, group)

    def _new_runner(self) -> Runner:
        memory, proposer = self._loaded.memory, self._loaded.proposer
        if self._spec.stages:
            return FirstStageRunner(self.model, memory, self._runner_config, proposer, self._link, self._group)
        return LeadingRunner(self.model, memory, self._runner_config, proposer, self._link)

    def _other_ranks(self) -> OtherRanks:
        return LeadingBlocks(self._link, self._group, self._device, self._name_by_content)

    def _named(self, own: bytes) -> bytes:
        return name_together(self._link, self._group, own, self._device)


class Follower(Rank):
    """Another rank: holds its share of the model and runs the steps that the leader announces. It takes no requests and
    tests nothing alone: the leader's self-test includes it."""

    _following: FollowingRunner | None = None
    _kept_blocks: FollowingBlocks | None = None

    def follow(self, plan: StepPlan) -> None:
        """Runs one announced step. When it raises, the model is lost on all ranks."""
        if self._following is None:
            raise GroupBroken("the leader announced a step to a rank that is asleep")
        if plan.order is None:
            if self._kept_blocks is not None:
                self._kept_blocks.before_step(plan)
            self._following.follow(plan)
        else:
            self._obey(plan.order)

    def _obey(self, order: BlockOrder) -> None:
        """Carries out an order about blocks in host memory."""
        if order.action == "name":
            self._name_by_content()
            return
        if self._fingerprint is None:
            return  # the order is `forget`, and this rank has kept nothing yet
        if self._kept_blocks is None:
            blocks = self._blocks()
            named, num_groups = partial(self._kinds_of, blocks), len(self._loaded.memory.num_pages)
            self._kept_blocks = FollowingBlocks(self._host_memory, blocks, named, num_groups, self._group, self._device)
        self._kept_blocks.obey(order)

    def _named(self, own: bytes) -> bytes:
        return name_of_all(self._group, own, self._device)

    def submit(self, request: EngineRequest) -> None:
        raise RequestError(f"request {request.id!r} was sent to a rank that only follows; send it to the leader")

    def warm_up(self) -> None:
        pass

    def _self_test(self) -> tuple[int, ...]:
        return ()

    def _new_runner(self) -> Runner:
        memory, config, proposer = self._loaded.memory, self._runner_config, self._loaded.proposer
        if self._spec.stages:
            self._following = LaterStageRunner(self.model, memory, config, proposer, self._group)
        else:
            self._following = FollowingRunner(self.model, memory, config, proposer=proposer)
        return self._following

    def _end_loop(self) -> None:
        super()._end_loop()
        self._following = None

    def _end_copies(self) -> None:
        super()._end_copies()
        if self._kept_blocks is not None:
            self._kept_blocks.collect()
            self._kept_blocks.let_go()
            self._kept_blocks = None
