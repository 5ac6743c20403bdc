"""The steps of a model that is divided by layers: hidden states travel from stage to stage and back to the first one.

The leader, which has the first layers, also has embedding and head. So between two stages a step sends the hidden
states of its tokens, and the last stage returns only those that tokens are drawn after or that are scored, or all if
the leader drafts tokens from them. Every step returns something: the leader keeps its turn until all stages have ended
it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.execution.inputs import PictureInputs, StepInputs
from cortex.neuron.engine.execution.prompt_scores import PromptScores
from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.parallel.steps import FollowingRunner, LeadingRunner
from cortex.neuron.engine.sampling.sampler import Draw, Drawn
from cortex.neuron.engine.scheduling.step_plan import StepPlan


class FirstStageRunner(LeadingRunner):
    """Runs the leader's layers, and draws from the hidden states that the last stage returns."""

    group: TorchGroup
    """Set by the engine before the first step."""

    def _hidden(self, plan: StepPlan, inputs: StepInputs) -> Tensor:
        sent = super()._hidden(plan, inputs)
        self.group.send(sent, 1)
        index = self._upload(returned_tokens(plan, inputs))
        hidden = sent[:, : self.model.config.hidden].contiguous()
        returned = self.group.receive(hidden.new_empty(len(index), hidden.shape[1]), self.group.shard.size - 1)
        return hidden.index_copy_(0, index, returned)


class LaterStageRunner(FollowingRunner):
    """Runs the layers of another stage in the announced steps."""

    group: TorchGroup
    """Set by the engine before the first step."""

    def _vectors(self, pictures: PictureInputs) -> Tensor:
        parameters = self.model.parameters
        shape = (len(pictures.index), 1, self.model.config.hidden)
        return torch.empty(shape, dtype=parameters.dtype, device=parameters.device)

    def _forward(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        draws: Sequence[Draw],
        mask: Tensor | None,
        scores: list[PromptScores],
    ) -> tuple[Drawn | None, Tensor | None]:
        del draws, mask, scores
        shard, parameters = self.group.shard, self.model.parameters
        batch = self._batch(plan, inputs)  # the first stage has put the vectors of pictures in their places
        shape = (len(batch.tokens), self.model.stage_width)
        empty = torch.empty(shape, dtype=parameters.dtype, device=parameters.device)
        hidden = self.model.through_layers(self.group.receive(empty, shard.rank - 1), batch)
        if shard.rank == shard.size - 1:
            hidden = hidden.index_select(0, self._upload(returned_tokens(plan, inputs)))
        self.group.send(hidden, (shard.rank + 1) % shard.size)
        return None, None


def returned_tokens(plan: StepPlan, inputs: StepInputs) -> NDArray[np.int64]:
    """The tokens whose hidden states the last stage returns, in order; at least one. All of them where the first stage
    drafts tokens."""
    if plan.num_proposals is not None:
        return np.arange(inputs.offsets[-1])
    scored = [
        np.arange(offset, offset + len(row.outputs.scores.following))
        for row, offset in zip(plan.rows, inputs.offsets, strict=False)
        if row.outputs.scores is not None
    ]
    tokens = np.unique(np.concatenate((inputs.last, *scored)))
    return tokens if len(tokens) else inputs.offsets[-1:] - 1
