"""The tokens that a row draws: what the sampler is asked for, and what of it the request gets. Pure."""

from __future__ import annotations

from cortex.neuron.engine.request import FinishReason, TokenLogprobs
from cortex.neuron.engine.sampling.sampler import Draw
from cortex.neuron.engine.scheduling.sequence import Sequence
from cortex.neuron.engine.scheduling.step_plan import RowPlan


def draws_of(sequence: Sequence, row: RowPlan) -> list[Draw]:
    """The draws of a planned row, which its sequence has already counted."""
    first = sequence.num_drawn - row.outputs.draws
    if row.outputs.draws == 1:
        return [Draw(sequence.row, first)]
    drafted: list[int | None] = [*row.drafted, None]
    return [Draw(sequence.row, first + index, token) for index, token in enumerate(drafted)]


def until_end(sequence: Sequence, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
    """The next tokens of a sequence, up to the one that ends it, and why that one does; None if none does."""
    request, constraint = sequence.request, sequence.constraint
    num_drawn = len(sequence.tokens) - len(request.prompt)
    for index, token in enumerate(tokens, start=1):
        is_complete = constraint is not None and constraint.is_complete_after(token)
        if constraint is not None and constraint.failure is not None:
            return tokens[:index], "error"
        if is_complete or (token in request.stop_token_ids and num_drawn + index > request.min_tokens):
            return tokens[:index], "stop"
        if num_drawn + index >= request.max_tokens:
            return tokens[:index], "length"
    return tokens, None


def trimmed(logprobs: TokenLogprobs, count: int) -> TokenLogprobs:
    """With at most `count` alternatives: another request of the batch may have asked for more."""
    return TokenLogprobs(logprobs.logprob, logprobs.top_ids[:count], logprobs.top_logprobs[:count])
