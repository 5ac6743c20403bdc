"""Loads a model, or one rank of a divided one: the leader, which is an engine like any other, or a follower."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import cast

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import GroupBroken, LoadCancelled, RequestError
from cortex.neuron.engine.execution.runner import Runner
from cortex.neuron.engine.host_pages.tier import OtherRanks
from cortex.neuron.engine.loading.filling import Progress
from cortex.neuron.engine.loading.loading import LoadedModel, load_model
from cortex.neuron.engine.parallel.group import TorchGroup, poller
from cortex.neuron.engine.parallel.kept_blocks import FollowingBlocks, LeadingBlocks, name_of_all, name_together
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
from cortex.neuron.engine.scheduling.step_plan import BlockOrder, StepPlan
from cortex.neuron.models.pooling.model import PooledModel


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
