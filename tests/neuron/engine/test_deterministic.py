"""Deterministic models: the tokens and log-probabilities of a request are independent of the batch, to the last bit.

On a GPU if there is one, else on the CPU. `kernels/test_batch_invariant.py` runs the GPU's kernels on the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import RESERVED_TOKENS, Engine
from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams

from ..engine_runs import filled, run, tokens_of
from ..tiny_models import tiny_delta, tiny_experts, tiny_sizes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    **tiny_sizes(vocab_size=160),
    "tie_word_embeddings": True,
}
MIXTURE = DENSE | {
    "model_type": "qwen3_moe",
    **tiny_experts(moe_intermediate_size=32),
}
HYBRID = DENSE | {
    "model_type": "qwen3_next",
    **tiny_delta(linear_key_head_dim=8),
    **tiny_experts(moe_intermediate_size=32),
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
FAMILIES = {"dense": DENSE, "mixture": MIXTURE, "hybrid": HYBRID}

Response = tuple[tuple[int, ...], tuple[Any, ...]]
"""Tokens, and their log-probabilities."""


def engine(family: str, reserved_tokens: int = RESERVED_TOKENS, **options: Any) -> Engine:
    limits = {"max_num_seqs": 8, "memory_bytes": 256 << 20}  # several engines are on a device at once
    spec = LoadSpec("", dtype="bfloat16", context_tokens=128, deterministic=True, **limits | options)
    made = Engine(build_model(FAMILIES[family], spec, DEVICE, filled(1)), spec, reserved_tokens=reserved_tokens)
    made.warm_up()
    return made


def request(number: int) -> EngineRequest:
    draw = random.Random(number)
    prompt = tuple(draw.randrange(2, 160) for _ in range(draw.randint(1, 40)))
    sampling = SamplingParams(temperature=draw.choice((0.0, 1.0)), top_p=0.9, seed=number, top_logprobs=5)
    return EngineRequest(str(number), prompt, 6, sampling)


def responses(made: Engine, requests: Sequence[EngineRequest]) -> dict[str, Response]:
    found = run(made, *requests)
    return {
        name: (tuple(tokens_of(outputs)), tuple(each for output in outputs for each in output.logprobs))
        for name, outputs in found.items()
    }


@cache
def one_alone(family: str, one: EngineRequest) -> Response:
    return responses(engine(family), [one])[one.id]


def alone(family: str, requests: Sequence[EngineRequest]) -> dict[str, Response]:
    """Each response from an engine of its own, where nothing is cached."""
    return {one.id: one_alone(family, one) for one in requests}


@pytest.mark.parametrize("family", FAMILIES)
def test_response_is_independent_of_the_batch(family: str) -> None:
    requests = [request(number) for number in range(5)]
    assert responses(engine(family), requests) == alone(family, requests)


@pytest.mark.parametrize("family", FAMILIES)
def test_response_does_not_depend_on_how_the_prompt_is_cut_or_cached(family: str) -> None:
    requests = [request(number) for number in (1, 3, 4)]
    expected = alone(family, requests)
    chunked = engine(family, prefill_chunk_tokens=8)
    assert responses(chunked, requests) == expected
    assert responses(chunked, requests) == expected, "from the prefix cache"


@pytest.mark.parametrize(("family", "cached"), [("dense", 2 * 44), ("hybrid", 32 + 44)])
def test_prompt_that_comes_again_has_the_same_response(family: str, cached: int) -> None:
    """It continues from a copy of the page in which it ends, and from the state before its last token."""
    one = EngineRequest("1", tuple(range(3, 48)), 6, SamplingParams(temperature=1.0, seed=3, top_logprobs=5))
    made = engine(family)
    first = responses(made, [one])
    assert [responses(made, [one]) for _ in range(2)] == [first, first]
    assert made.stats().cached_tokens == cached


def test_preempted_request_continues_with_the_same_tokens() -> None:
    requests = [
        EngineRequest(str(number), tuple(range(2 + number, 40 + number)), 40, SamplingParams(temperature=0.0))
        for number in range(3)
    ]
    expected = alone("dense", requests)
    roomy = engine("dense")
    bytes_of_a_page = roomy.info.kv_bytes // roomy.info.num_pages
    tight = engine("dense", reserved_tokens=0, memory_bytes=roomy.info.weight_bytes + 7 * bytes_of_a_page)
    assert responses(tight, requests) == expected
    assert tight.stats().preemptions > 0
