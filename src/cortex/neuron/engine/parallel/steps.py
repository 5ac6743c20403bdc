"""The steps of a divided model: the leader announces each plan and draws the tokens; the other ranks compute the same
and receive the tokens. Page tables, positions and recurrent states follow from the plans, so all ranks agree on them.

Hidden states of a model that is divided by layers travel from stage to stage and back to the first one. The leader,
which has the first layers, also has embedding and head. So between two stages a step sends the hidden states of its
tokens. The last stage returns only those that are drawn from or scored, or all if the leader drafts tokens from them.
Every step returns something, so that the leader keeps its turn until all stages have ended it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.errors import GroupBroken
from cortex.neuron.engine.execution.inputs import PictureInputs, StepInputs
from cortex.neuron.engine.execution.prompt_scores import PromptScores
from cortex.neuron.engine.execution.results import Launched
from cortex.neuron.engine.execution.runner import NewMask, Runner, RunnerConfig
from cortex.neuron.engine.memory.sequences import SequenceMemory
from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.sampling.sampler import Draw, Drawn
from cortex.neuron.engine.scheduling.step_plan import CAPTURE, StepPlan
from cortex.neuron.kernels.sampling.rows import Draws
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.proposer import Proposer


class RankLink(Protocol):
    """How a rank of a divided model takes part in the work of its worker while it waits for other ranks."""

    def follow_others(self) -> None:
        """Runs the steps that leaders of other models have announced to this worker, and begins none."""
        ...


class StepLink(RankLink, Protocol):
    """The leader's connection to the other ranks of its model."""

    def turn(self) -> AbstractContextManager[None]:
        """Held while the ranks wait for each other, as in a step, so that no other divided model sharing a device
        computes a step meanwhile. Otherwise two models could deadlock, each on a device that the other needs.

        While the leader waits for its turn, it takes part in the steps of the models that it follows.
        """
        ...

    def announce(self, plan: StepPlan) -> None:
        """Sends a plan to the other ranks, which run plans in the order of the calls. Raises GroupBroken."""
        ...


class LeadingRunner(Runner):
    """Runs the leader's part of every step.

    A step that fails after it was announced leaves the other ranks in the middle of it: the model is lost then.
    """

    def __init__(
        self, model: Decoder, memory: SequenceMemory, config: RunnerConfig, proposer: Proposer | None, link: StepLink
    ) -> None:
        self._link = link
        super().__init__(model, memory, config, proposer=proposer)

    def _run(self, plan: StepPlan, draws: Sequence[Draw], mask: NewMask | None) -> Launched:
        allowed = None if mask is None else mask()  # if that fails, the others have not begun the step
        with self._announced(replace(plan, new_rows=())):
            launched = super()._run(plan, draws, None if allowed is None else lambda: allowed)
            launched.wait()
            return launched

    def _capture_next(self) -> bool:
        if self._next_graphs is None:
            return False
        with self._announced(CAPTURE):
            return super()._capture_next()

    @contextlib.contextmanager
    def _announced(self, plan: StepPlan) -> Iterator[None]:
        with self._link.turn():
            self._link.announce(plan)
            try:
                yield
            except GroupBroken:
                raise
            except Exception as error:
                raise GroupBroken("the leader failed in a step that the other ranks of the model began") from error

    def _vectors(self, pictures: PictureInputs) -> Tensor:
        return self.model.parameters.group.broadcast(super()._vectors(pictures).contiguous())

    def _draw(self, logits: Tensor, draws: Draws, rows: NDArray[np.int64]) -> Drawn:
        drawn = super()._draw(logits, draws, rows)
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
        return False  # together with the leader, at its command

    def _vectors(self, pictures: PictureInputs) -> Tensor:
        """Receives the picture vectors from the leader."""
        parameters, tower = self.model.parameters, self.model.architecture.tower
        assert tower is not None
        shape = (len(pictures.index), tower.num_parts, tower.out)
        return parameters.group.broadcast(torch.empty(shape, dtype=parameters.dtype, device=parameters.device))

    def _draw(self, logits: Tensor, draws: Draws, rows: NDArray[np.int64]) -> Drawn:
        """Receives the tokens that the leader draws."""
        del logits, rows
        tokens = self.model.parameters.group.broadcast(torch.empty(len(draws), dtype=torch.int64, device=self.device))
        return Drawn(tokens, torch.ones_like(tokens, dtype=torch.bool))


class FirstStageRunner(LeadingRunner):
    """Runs the leader's layers, and draws from the hidden states that the last stage returns."""

    def __init__(
        self,
        model: Decoder,
        memory: SequenceMemory,
        config: RunnerConfig,
        proposer: Proposer | None,
        link: StepLink,
        group: TorchGroup,
    ) -> None:
        self._group = group
        super().__init__(model, memory, config, proposer, link)

    def _hidden(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        sent = super()._hidden(plan, inputs)
        self._group.send(sent, 1)
        index = self._upload(returned_tokens(plan, inputs))
        hidden = sent[:, : self.model.config.hidden].contiguous()
        returned = self._group.receive(hidden.new_empty(len(index), hidden.shape[1]), self._group.shard.size - 1)
        return hidden.index_copy_(0, index, returned)


class LaterStageRunner(FollowingRunner):
    """Runs the layers of another stage in the announced steps."""

    def __init__(
        self,
        model: Decoder,
        memory: SequenceMemory,
        config: RunnerConfig,
        proposer: Proposer | None,
        group: TorchGroup,
    ) -> None:
        self._group = group
        super().__init__(model, memory, config, proposer=proposer)

    def _vectors(self, pictures: PictureInputs) -> Tensor:
        parameters = self.model.parameters
        shape = (len(pictures.index), 1, self.model.config.hidden)
        return torch.empty(shape, dtype=parameters.dtype, device=parameters.device)

    def _forward(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        draws: Sequence[Draw],
        mask: NewMask | None,
        scores: list[PromptScores],
    ) -> tuple[Drawn | None, Tensor | None]:
        del draws, mask, scores
        shard, parameters = self._group.shard, self.model.parameters
        batch = self._batch(plan, inputs)  # the first stage has put the vectors of pictures in their places
        shape = (len(batch.tokens), self.model.stage_width)
        empty = torch.empty(shape, dtype=parameters.dtype, device=parameters.device)
        hidden = self.model.through_layers(self._group.receive(empty, shard.rank - 1), batch)
        if shard.rank == shard.size - 1:
            hidden = hidden.index_select(0, self._upload(returned_tokens(plan, inputs)))
        self._group.send(hidden, (shard.rank + 1) % shard.size)
        return None, None


def returned_tokens(plan: StepPlan, inputs: StepInputs) -> NDArray[np.int64]:
    """The tokens whose hidden states the last stage returns, in order; at least one, and all if the first stage drafts
    tokens."""
    if plan.num_proposals is not None:
        return np.arange(inputs.offsets[-1])
    scored = [
        np.arange(offset, offset + len(row.outputs.scores.following))
        for row, offset in zip(plan.rows, inputs.offsets, strict=False)
        if row.outputs.scores is not None
    ]
    tokens = np.unique(np.concatenate((inputs.last, *scored)))
    return tokens if len(tokens) else inputs.offsets[-1:] - 1
