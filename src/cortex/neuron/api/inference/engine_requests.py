"""Engine requests from a client's request: with defaults filled in, one sequence per choice. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import msgspec

from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.neuron.pictures.picture import Picture
from cortex.wire.errors import InsufficientQuota, InvalidValue
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.requests import GenerateRequest, Sampling

T = TypeVar("T")

MAX_SCORES = 50_000
"""Log-probabilities of prompts in one response: about 2.5 MB of JSON, which the event loop encodes."""

_LEAST_TOP_P = 1e-6
"""`top_p: 0` means "only the top token"; this keeps exactly that one."""


def sampling_params(sampling: Sampling, defaults: SamplingDefaults) -> SamplingParams:
    """The client's values, else the model's recommended ones, else plain sampling at temperature 1."""
    ours = SamplingParams()
    return SamplingParams(
        temperature=_first(sampling.temperature, defaults.temperature, ours.temperature),
        top_k=_first(sampling.top_k, defaults.top_k, ours.top_k),
        top_p=max(_LEAST_TOP_P, _first(sampling.top_p, defaults.top_p, ours.top_p)),
        min_p=_first(sampling.min_p, defaults.min_p, ours.min_p),
        repetition_penalty=_first(sampling.repetition_penalty, defaults.repetition_penalty, ours.repetition_penalty),
        repetition_window=_first(sampling.repetition_window, None, ours.repetition_window),
        presence_penalty=_first(sampling.presence_penalty, None, ours.presence_penalty),
        frequency_penalty=_first(sampling.frequency_penalty, None, ours.frequency_penalty),
        logit_bias=tuple(sampling.logit_bias.items()),
        allowed_token_ids=sampling.allowed_token_ids,
        seed=sampling.seed,
        top_logprobs=sampling.top_logprobs if sampling.logprobs else None,
    )


def engine_requests(
    request: GenerateRequest,
    *,
    id: str,
    first_index: int = 0,
    prompt: tuple[int, ...],
    context_tokens: int,
    defaults: SamplingDefaults,
    eos_ids: tuple[int, ...],
    turn_ends: tuple[int, ...] = (),
    grammar: str | None = None,
    prediction: tuple[int, ...] = (),
    pictures: tuple[Picture, ...] = (),
    principal: str = "",
) -> tuple[EngineRequest, ...]:
    """One per choice, numbered from `first_index`.

    Without a limit the response may fill the rest of the context; the node checks the prompt.
    Choices of a request with a seed get seeds derived from it, so that the same request gives the same `n` choices.
    """
    sampling = request.sampling
    params = sampling_params(sampling, defaults)
    room = max(1, context_tokens - len(prompt))
    # A request for no tokens has its prompt computed, for its scores or for later requests; the one token that it draws
    # is left out.
    max_tokens = room if sampling.max_tokens is None else max(1, min(sampling.max_tokens, room))
    stop_token_ids = (() if sampling.ignore_eos else eos_ids) + sampling.stop_token_ids
    return tuple(
        EngineRequest(
            id=f"{id}.{first_index + index}",
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=_with_seed(params, index),
            stop_token_ids=stop_token_ids,
            min_tokens=min(sampling.min_tokens, max_tokens),
            grammar=grammar,
            principal=principal,
            level=request.level,
            tenant=request.tenant,
            checkpoint_at=turn_ends,
            prompt_logprobs=_num_prompt_logprobs(request),
            prediction=prediction,
            pictures=pictures,
            speculates=sampling.speculation != "off",
        )
        for index in range(sampling.n)
    )


def within_limit(request: GenerateRequest, num_prompt_tokens: int, token_limit: int) -> GenerateRequest:
    """`request` with equal limits for its choices, so that with its prompts they have at most `token_limit` tokens.

    Raises InsufficientQuota for prompts that leave no token for a choice.
    """
    left = token_limit - num_prompt_tokens
    limit, wanted = left // request.num_choices, request.sampling.max_tokens
    if left < 0 or (limit < 1 and wanted != 0):
        raise InsufficientQuota(
            f"The prompt has {num_prompt_tokens} tokens, and the budget of the key or its group has {token_limit} "
            "left; shorten the prompt, or ask the operator for a larger budget.",
            details={"prompt_tokens": num_prompt_tokens},
        )
    sampling = msgspec.structs.replace(request.sampling, max_tokens=limit if wanted is None else min(wanted, limit))
    return msgspec.structs.replace(request, sampling=sampling)


def check_num_scores(request: GenerateRequest, num_prompt_tokens: int) -> None:
    """Raises InvalidValue if the log-probabilities of the prompts exceed the limit of one response."""
    num_top = _num_prompt_logprobs(request)
    if num_top is None:
        return
    num_scores = num_prompt_tokens * request.sampling.n * (1 + num_top)
    if num_scores > MAX_SCORES:
        raise InvalidValue(
            f"this asks for {num_scores} log-probabilities of {num_prompt_tokens} prompt tokens, at most {MAX_SCORES} "
            "are allowed; send shorter or fewer prompts, or ask for fewer top tokens",
            param="prompt_logprobs" if request.sampling.prompt_logprobs is not None else "logprobs",
        )


def _num_prompt_logprobs(request: GenerateRequest) -> int | None:
    sampling = request.sampling
    wanted = [] if sampling.prompt_logprobs is None else [sampling.prompt_logprobs]
    if request.echo and sampling.logprobs:
        wanted.append(sampling.top_logprobs)
    return max(wanted, default=None)


def _with_seed(params: SamplingParams, index: int) -> SamplingParams:
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=params.seed + index)


def _first(said: T | None, recommended: T | None, ours: T) -> T:
    if said is not None:
        return said
    return ours if recommended is None else recommended
