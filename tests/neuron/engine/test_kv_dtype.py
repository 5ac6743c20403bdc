"""A KV cache of 8-bit values: one byte for each, nearly the same logits, and everything else as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams

from ..engine_runs import filled, run
from ..tiny_models import tiny_sizes

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    **tiny_sizes(),
    "tie_word_embeddings": True,
}
PROMPT = tuple((7 * number) % 90 + 2 for number in range(80))


def engine(kv_dtype: Any) -> Engine:
    spec = LoadSpec("", dtype="float32", kv_dtype=kv_dtype, context_tokens=128, max_num_seqs=2)
    made = Engine(build_model(CONFIG, spec, CPU, filled(1)), spec)
    made.warm_up()
    return made


def logprobs(made: Engine, name: str) -> tuple[dict[int, float], int]:
    """The greedy tokens after the prompt, and how many tokens of it were cached."""
    request = EngineRequest(name, PROMPT, 1, SamplingParams(temperature=0.0, top_logprobs=20))
    likely: dict[int, float] = {}
    cached = 0
    for output in run(made, request)[name]:
        cached = max(cached, output.cached_tokens or 0)
        for position in output.logprobs:
            likely |= dict(zip(position.top_ids, position.top_logprobs, strict=True))
    return likely, cached


def test_eight_bit_cache_takes_a_byte_for_each_number_and_gives_nearly_the_same_logits() -> None:
    small, large = engine("fp8"), engine("auto")
    assert small.info.num_pages == large.info.num_pages
    assert small.info.kv_bytes * 4 == large.info.kv_bytes
    expected, _ = logprobs(large, "a")
    found, _ = logprobs(small, "a")
    shared = expected.keys() & found.keys()
    assert len(shared) >= 15
    assert max(abs(expected[token] - found[token]) for token in shared) < 0.5


def test_cached_prefix_and_a_sleep_give_what_the_first_run_gave() -> None:
    made = engine("fp8")
    first, cached_first = logprobs(made, "a")
    again, cached_again = logprobs(made, "b")
    made.sleep()
    made.wake(lambda *_: None)
    awake, cached_awake = logprobs(made, "c")
    assert cached_first == 0 < cached_again
    assert cached_awake == 0
    assert again == pytest.approx(first, abs=0.1)
    assert awake == pytest.approx(first, abs=1e-3)
