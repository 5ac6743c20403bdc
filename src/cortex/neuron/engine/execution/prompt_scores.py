"""Log-probabilities of a prompt's own tokens, with which evaluations score texts.

Such a step computes logits at every position instead of the last. A block of positions at a time keeps memory bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cortex.neuron.engine.execution.inputs import StepInputs
from cortex.neuron.engine.request import TokenLogprobs
from cortex.neuron.engine.scheduling.step_plan import StepPlan

BLOCK_POSITIONS: Final = 64
"""Positions whose logits exist at once: 40 MB in single precision for a vocabulary of 152k."""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scored positions of one row: device tensors, or their copies on the host."""

    logprobs: Tensor
    """[positions] float32"""
    ranks: Tensor
    """[positions] int64; 1 is the top token"""
    top_ids: Tensor
    """[positions, top tokens] int64"""
    top_logprobs: Tensor

    def map(self, change: Callable[[Tensor], Tensor]) -> PromptScores:
        return PromptScores(*map(change, (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)))

    def read(self) -> list[TokenLogprobs]:
        """Only for copies on the host that are complete."""
        parts = (part.tolist() for part in (self.logprobs, self.top_ids, self.top_logprobs, self.ranks))
        return [
            TokenLogprobs(logprob, tuple(ids), tuple(many), rank)
            for logprob, ids, many, rank in zip(*parts, strict=True)
        ]


def score_prompts(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    plan: StepPlan,
    inputs: StepInputs,
    upload: Callable[[NDArray[Any]], Tensor],
) -> Iterator[PromptScores]:
    """The scores of each row that asks for them, in plan order. hidden: [tokens of the step, hidden]"""
    for row, offset in zip(plan.rows, inputs.offsets, strict=False):
        scoring = row.outputs.scores
        if scoring is not None:
            states = hidden[int(offset) : int(offset) + len(scoring.following)]
            following = upload(np.array(scoring.following, dtype=np.int64))
            yield _scores(logits_of, states, following, scoring.num_top)


def _scores(logits_of: Callable[[Tensor], Tensor], states: Tensor, following: Tensor, num_top: int) -> PromptScores:
    """states: [positions, hidden]; following: [positions] the prompt's own next tokens"""
    blocks = []
    for state, token in zip(states.split(BLOCK_POSITIONS), following.split(BLOCK_POSITIONS), strict=True):
        logprobs = logits_of(state).float().log_softmax(-1)
        own = logprobs.gather(1, token[:, None])
        top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
        blocks.append((own[:, 0], (logprobs > own).sum(-1) + 1, top.indices, top.values))
    return PromptScores(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))
