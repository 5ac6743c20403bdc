"""An engine over a model with recurrent layers: responses from the cache and from a full batch equal those of a request
alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.memory.plan import StateSlots
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.sizes import state_bytes

from ..engine_runs import run, tokens_of
from ..tiny_models import tiny_delta, tiny_sizes

CONFIG = {
    "model_type": "qwen3_5_text",
    **tiny_sizes(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        max_position_embeddings=1024,
        head_dim=16,
    ),
    **tiny_delta(linear_key_head_dim=8, linear_value_head_dim=8),
    "full_attention_interval": 2,
}
SIZES = CONFIG | {"num_hidden_layers": 2}
KINDS = {
    "delta net": CONFIG,
    "short convolution": SIZES | {"model_type": "lfm2", "full_attn_idxs": [1]},
    "Mamba": SIZES
    | {
        **{"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "mamba_n_heads": 8},
        **{"mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2},
        **{"shared_intermediate_size": 48, "num_local_experts": 0, "num_experts_per_tok": 0},
    },
}
GREEDY = SamplingParams(temperature=0.0)


def make_engine(config: dict[str, Any] = CONFIG, **spec: Any) -> Engine:
    def fill(parameters: Parameters) -> None:
        generator = torch.Generator().manual_seed(0)
        for binding in parameters.bindings:
            view = binding.destination
            if view.dim() == 1:  # gains, and rates of decay, which are positive
                view.uniform_(0.1, 1.0, generator=generator)
            else:
                view.normal_(0.0, 2 * view.shape[-1] ** -0.5, generator=generator)

    load = LoadSpec(path="", dtype="float32", **{"max_num_seqs": 4, "prefill_chunk_tokens": 100} | spec)
    return Engine(build_model(config, load, torch.device("cpu"), fill), load)


def finish(engine: Engine, *requests: EngineRequest) -> dict[str, tuple[list[int], int]]:
    """Each request's tokens, and how many of its prompt's came from the cache."""
    found: dict[str, tuple[list[int], int]] = {}
    for name, outputs in run(engine, *requests).items():
        assert all(output.error is None for output in outputs)
        [cached] = [output.cached_tokens for output in outputs if output.cached_tokens is not None]
        found[name] = tokens_of(outputs), cached
    return found


def some_tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(64), k=count))


def test_conversation_is_the_same_with_and_without_the_cache() -> None:
    engine = make_engine()
    prompt: tuple[int, ...] = some_tokens(70, 0)
    turn_ends: tuple[int, ...] = ()
    expected_cached = 0
    for turn in range(3):
        request = EngineRequest(str(turn), prompt, 40, GREEDY, checkpoint_at=turn_ends)
        tokens, cached = finish(engine, request)[str(turn)]
        assert cached == expected_cached
        assert tokens == finish(make_engine(), request)[str(turn)][0]
        turn_ends = (*turn_ends, len(prompt) + len(tokens))
        expected_cached = (len(prompt) + len(tokens) - 1) // 32 * 32
        prompt = (*prompt, *tokens, *some_tokens(50, turn + 1))
    assert engine.stats().cached_tokens > 0


def test_prompts_that_share_their_beginning_are_computed_from_where_an_earlier_one_diverged() -> None:
    engine, shared = make_engine(), some_tokens(128, 3)
    questions = [EngineRequest(str(seed), shared + some_tokens(40, seed), 4, GREEDY) for seed in (4, 5, 6)]
    found = [finish(engine, question)[question.id] for question in questions]
    assert [cached for _, cached in found] == [0, 0, 128], "the second saves the state for the third"
    assert found[2][0] == finish(make_engine(), questions[2])["6"][0]
    engine.check_integrity()


def test_rewritten_response_is_computed_from_the_turn_before_it() -> None:
    engine = make_engine()
    prompt = some_tokens(200, 1)
    finish(engine, EngineRequest("first", prompt, 10, GREEDY, checkpoint_at=(50, 140)))
    rewritten = EngineRequest("second", (*prompt[:150], *some_tokens(40, 2)), 10, GREEDY)
    tokens, cached = finish(engine, rewritten)["second"]
    assert cached == 128
    assert tokens == finish(make_engine(), rewritten)["second"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_states_saved_inside_a_step_are_those_of_steps_that_end_there(kind: str) -> None:
    """Two prompts, in chunks of up to 100 tokens."""
    engine, stopping = make_engine(KINDS[kind]), make_engine(KINDS[kind], deterministic=True)
    prompts = [some_tokens(count, count) for count in (150, 41)]
    for number, prompt in enumerate(prompts):
        for each in (engine, stopping):
            each.submit(EngineRequest(str(number), prompt, 1, GREEDY))
    for each in (engine, stopping):
        while each.has_work:
            each.step()
    continued = [EngineRequest(f"{index}b", (*prompt, 5), 6, GREEDY) for index, prompt in enumerate(prompts)]
    found, expected = finish(engine, *continued), finish(stopping, *continued)
    assert found == expected
    assert [cached for _, cached in found.values()] == [128, 32]


@pytest.mark.parametrize("memory", [None, 470_000])
def test_concurrent_requests_respond_as_each_does_alone(memory: int | None) -> None:
    """With little memory they evict each other's pages and states."""
    engine = make_engine() if memory is None else make_engine(memory_bytes=memory)
    shared = some_tokens(90, 3)
    lengths = [0, 30, 60, 90, 60, 90]
    requests = [
        EngineRequest(
            str(number), (*shared[:length], *some_tokens(17 * number + 1, number)), 14, GREEDY, checkpoint_at=(length,)
        )
        for number, length in enumerate(lengths)
    ]
    together = finish(engine, *requests)
    for request in requests:
        assert together[request.id][0] == finish(make_engine(), request)[request.id][0]
    again = finish(engine, *requests)
    assert all(again[name][0] == tokens for name, (tokens, _) in together.items())
    if memory is None:
        assert all(again[request.id][1] == (len(request.prompt) - 1) // 32 * 32 for request in requests)


def test_small_device_runs_fewer_sequences_and_notes_it() -> None:
    engine = make_engine(memory_bytes=400_000, max_num_seqs=64)
    rows = next(int(note.split()[0]) for note in engine.info.notes if "recurrent" in note)
    assert 1 <= rows < 64
    requests = [EngineRequest(str(n), some_tokens(20, n), 5, GREEDY) for n in range(rows + 2)]
    assert all(len(tokens) == 5 for tokens, _ in finish(engine, *requests).values())


def test_planned_slots_take_the_planned_bytes() -> None:
    model = make_engine().model
    slot_bytes = state_bytes(model.architecture, torch.float32.itemsize)
    assert StateSlots.plan(0, 7, 0, "cpu") == StateSlots(7)
    whole = StateSlots.plan(slot_bytes, 4, 1 << 30, "cpu")
    assert (whole.rows, whole.checkpoints, whole.notes) == (4, 32, ())
    assert whole.num_bytes == whole.num_slots * (4 * 8 * 8 * 4 + 4 * 64 * 4) * 2
    least = StateSlots.plan(slot_bytes, 4, 0, "cpu")
    assert (least.rows, least.checkpoints) == (1, 0)
