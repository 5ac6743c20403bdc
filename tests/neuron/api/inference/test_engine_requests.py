import pytest

from cortex.neuron.api.inference.engine_requests import engine_requests, sampling_params, within_limit
from cortex.neuron.engine.request import EngineRequest, SamplingParams
from cortex.wire.errors import InsufficientQuota
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.requests import GenerateRequest, Sampling

RECOMMENDED = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)


def jobs(sampling: Sampling, *, context_tokens: int = 100, num_prompt: int = 10) -> tuple[EngineRequest, ...]:
    return engine_requests(
        GenerateRequest(model="m", prompt="x", sampling=sampling),
        id="a",
        prompt=tuple(range(num_prompt)),
        context_tokens=context_tokens,
        defaults=SamplingDefaults(),
        eos_ids=(7,),
    )


def test_prefers_the_client_then_the_model_then_plain_sampling() -> None:
    assert sampling_params(Sampling(), SamplingDefaults()) == SamplingParams()
    params = sampling_params(Sampling(temperature=0.0, top_k=0), RECOMMENDED)
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.0, 0, 0.95, 1.05)


def test_top_p_zero_keeps_the_likeliest_token() -> None:
    assert 0 < sampling_params(Sampling(top_p=0.0), RECOMMENDED).top_p < 1e-3


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [(Sampling(), None), (Sampling(logprobs=True), 0), (Sampling(logprobs=True, top_logprobs=5), 5)],
)
def test_requests_top_logprobs_only_with_logprobs(sampling: Sampling, expected: int | None) -> None:
    assert sampling_params(sampling, RECOMMENDED).top_logprobs == expected


def test_limits_the_response_to_the_rest_of_the_context() -> None:
    assert jobs(Sampling())[0].max_tokens == 90
    assert jobs(Sampling(max_tokens=5))[0].max_tokens == 5
    assert jobs(Sampling(max_tokens=500))[0].max_tokens == 90
    assert jobs(Sampling(), num_prompt=200)[0].max_tokens == 1


def test_stops_at_eos_unless_ignored_and_at_the_clients_tokens() -> None:
    assert jobs(Sampling(stop_token_ids=(3,)))[0].stop_token_ids == (7, 3)
    assert jobs(Sampling(stop_token_ids=(3,), ignore_eos=True))[0].stop_token_ids == (3,)


def test_every_choice_has_its_own_id_and_seed() -> None:
    several = jobs(Sampling(n=3, seed=5))
    assert [job.id for job in several] == ["a.0", "a.1", "a.2"]
    assert [job.sampling.seed for job in several] == [5, 6, 7]
    assert [job.sampling.seed for job in jobs(Sampling(n=2))] == [None, None]


@pytest.mark.parametrize(
    ("sampling", "num_prompts", "expected"),
    [
        (Sampling(), 1, 70),
        (Sampling(max_tokens=5), 1, 5),
        (Sampling(max_tokens=500), 1, 70),
        (Sampling(n=4), 1, 17),
        (Sampling(n=4), 3, 5),
        (Sampling(max_tokens=0), 1, 0),
    ],
)
def test_choices_and_prompts_share_the_token_limit(sampling: Sampling, num_prompts: int, expected: int) -> None:
    request = GenerateRequest(model="m", prompt="x", more_prompts=("y",) * (num_prompts - 1), sampling=sampling)
    assert within_limit(request, 30, 100).sampling.max_tokens == expected


@pytest.mark.parametrize(
    ("sampling", "limit"), [(Sampling(), 30), (Sampling(n=4), 33), (Sampling(max_tokens=0), 29), (Sampling(), 0)]
)
def test_prompt_that_leaves_no_token_for_a_choice_is_over_the_limit(sampling: Sampling, limit: int) -> None:
    with pytest.raises(InsufficientQuota, match="The prompt has 30 tokens") as caught:
        within_limit(GenerateRequest(model="m", prompt="x", sampling=sampling), 30, limit)
    assert caught.value.details == {"prompt_tokens": 30}
