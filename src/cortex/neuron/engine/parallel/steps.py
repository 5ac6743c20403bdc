"""The steps of a divided model: the leader announces each plan and draws the tokens; the other ranks compute the same
and take the tokens over. Page tables, positions and recurrent states follow from the plans, so all ranks have the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from cortex.neuron.engine.errors import GroupBroken
from cortex.neuron.engine.execution.inputs import PictureInputs
from cortex.neuron.engine.execution.results import Launched
from cortex.neuron.engine.execution.runner import Runner
from cortex.neuron.engine.sampling.sampler import Draw, Drawn
from cortex.neuron.engine.scheduling.step_plan import CAPTURE, StepPlan


class RankLink(Protocol):
    """How a rank of a divided model takes part in the work of its worker while it waits for other ranks."""

    def follow_others(self) -> None:
        """Runs the steps that leaders of other models have announced to this worker, and begins none."""
        ...


class StepLink(RankLink, Protocol):
    """The leader's connection to the other ranks of its model."""

    def turn(self) -> AbstractContextManager[None]:
        """Held while the ranks wait for each other, as in a step: no other divided model that shares a device with this
        one computes a step meanwhile. Otherwise two models could wait for each other, each on a device that the other
        one needs.

        While the leader waits for its turn, it takes part in the steps of the models that it follows.
        """
        ...

    def announce(self, plan: StepPlan) -> None:
        """Sends a plan to the other ranks, which run plans in the order of the calls. Raises GroupBroken."""
        ...


class LeadingRunner(Runner):
    """Runs the leader's part of every step, through `link`, which the engine sets before the first step.

    A step that fails after it was announced leaves the other ranks in the middle of it: the model is lost then.
    """

    link: StepLink

    def _run(self, plan: StepPlan, draws: Sequence[Draw], mask: Tensor | None) -> Launched:
        with self._announced(replace(plan, new_rows=())):
            launched = super()._run(plan, draws, mask)
            launched.wait()
            return launched

    def _capture_next(self) -> bool:
        if self._next_graphs is None:
            return False
        with self._announced(CAPTURE):
            return super()._capture_next()

    @contextlib.contextmanager
    def _announced(self, plan: StepPlan) -> Iterator[None]:
        with self.link.turn():
            self.link.announce(plan)
            try:
                yield
            except GroupBroken:
                raise
            except Exception as error:
                raise GroupBroken("the leader failed in a step that the other ranks of the model began") from error

    def _vectors(self, pictures: PictureInputs) -> Tensor:
        return self.model.parameters.group.broadcast(super()._vectors(pictures).contiguous())

    def _draw(
        self, logits: Tensor, rows: Tensor, positions: Tensor, draws: Sequence[Draw], mask: Tensor | None
    ) -> Drawn:
        drawn = super()._draw(logits, rows, positions, draws, mask)
        self.model.parameters.group.broadcast(drawn.tokens)
        return drawn


class FollowingRunner(Runner):
    """Runs the announced steps on the other ranks."""

    def follow(self, plan: StepPlan) -> None:
        """Raises GroupBroken, or anything that a step may raise; the model is lost then."""
        if plan.captures:
            with torch.inference_mode():
                super()._capture_next()
            return
        draws = [Draw(row.row, 0) for row in plan.rows for _ in range(row.outputs.draws)]
        self._run(plan, draws, None).wait()

    def _capture_next(self) -> bool:
        return False  # together with the leader, when it says so

    def _vectors(self, pictures: PictureInputs) -> Tensor:
        """Takes the vectors over that the leader's tower makes."""
        parameters, tower = self.model.parameters, self.model.architecture.tower
        assert tower is not None
        shape = (len(pictures.index), tower.num_parts, tower.out)
        return parameters.group.broadcast(torch.empty(shape, dtype=parameters.dtype, device=parameters.device))

    def _draw(
        self, logits: Tensor, rows: Tensor, positions: Tensor, draws: Sequence[Draw], mask: Tensor | None
    ) -> Drawn:
        """Takes the tokens over that the leader draws."""
        del logits, positions, draws, mask
        tokens = self.model.parameters.group.broadcast(torch.empty_like(rows))
        return Drawn(tokens, torch.ones_like(tokens, dtype=torch.bool))
