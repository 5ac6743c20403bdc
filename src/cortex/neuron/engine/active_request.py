"""A running request: its tokens so far, its stop conditions, and its outputs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np

from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.request import EngineRequest, FinishReason, StepOutput, TokenLogprobs
from cortex.neuron.engine.sampling.constraints import Constraint
from cortex.neuron.engine.sampling.sampler import Draw
from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.scheduling.step_plan import RowPlan
from cortex.neuron.engine.speculation.speculation import CheckedDraft


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request from its submission to its last output. Written by the step loop only."""

    request: EngineRequest
    tokens: list[int]
    """The tokens of the prompt, and the drawn ones that the host knows."""
    sequence: Sequence
    """Its place in the scheduler, which owns it; read-only here."""
    constraint: Constraint | None = None
    """The grammar that its output must conform to; None without a constraint."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of the prompt from its second token on, for the steps read so far; only if requested."""
    has_reported: bool = False
    """Whether its first output was produced."""
    is_finished: bool = False

    def until_end(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """The next tokens, up to the one that ends the request, and the finish reason; None if it continues. Advances
        the grammar, so call it once per token."""
        request, constraint = self.request, self.constraint
        num_drawn = len(self.tokens) - len(request.prompt)
        for index, token in enumerate(tokens, start=1):
            is_complete = constraint is not None and constraint.is_complete_after(token)
            if constraint is not None and constraint.failure is not None:
                return tokens[:index], "rejected" if constraint.is_contradiction else "error"
            if is_complete or (token in request.stop_token_ids and num_drawn + index > request.min_tokens):
                return tokens[:index], "stop"
            if num_drawn + index >= request.max_tokens:
                return tokens[:index], "length"
        return tokens, None

    def output(
        self,
        tokens: tuple[int, ...],
        finish: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...],
        checked: CheckedDraft,
    ) -> StepOutput:
        """The output for the tokens that one row drew. The first output also has the facts that are reported once."""
        if finish in ("error", "rejected") and self.constraint is not None:
            return StepOutput(self.request.id, finish=finish, error=self.constraint.failure)
        num_cached: int | None = None
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if not self.has_reported:
            self.has_reported = True
            num_cached, prompt_logprobs = self.sequence.cached or 0, tuple(self.prompt_logprobs)
        num_top = self.request.sampling.top_logprobs
        return StepOutput(
            self.request.id,
            tokens,
            () if num_top is None else tuple(_trimmed(one, num_top) for one in logprobs),
            num_cached,
            finish,
            prompt_logprobs=prompt_logprobs,
            num_drafted=checked.num_drafted,
            num_accepted=checked.num_accepted,
            num_predicted=checked.num_predicted,
        )


def draws_of(request: EngineRequest, row: RowPlan) -> list[Draw]:
    """The draws of a planned row."""
    num_draws = row.outputs.draws
    first = row.start + row.inputs.count + 1 - num_draws - len(request.prompt)
    if num_draws == 1:
        return [Draw(row.row, first)]
    drafted: list[int | None] = [*row.drafted, None]
    return [Draw(row.row, first + index, token) for index, token in enumerate(drafted)]


def packed_tokens(name: str, tokens: Ordered[int], vocab: int) -> array[int]:
    """A copy of the token ids, in 32 bits. Checking an array takes a quarter of the time of `min` and `max`, which
    matters for long prompts. Raises RequestError for ids that are not from 0 to `vocab` - 1."""
    try:
        packed = array("I", tokens)
        if not packed or np.frombuffer(packed, np.uint32).max() < vocab:
            return packed
    except OverflowError:
        pass
    raise RequestError(f"the {name} has token ids outside the model's vocabulary of {vocab}")


def _trimmed(logprobs: TokenLogprobs, count: int) -> TokenLogprobs:
    """Cut to `count` alternatives, because another request of the batch may have asked for more."""
    return TokenLogprobs(logprobs.logprob, logprobs.top_ids[:count], logprobs.top_logprobs[:count])
