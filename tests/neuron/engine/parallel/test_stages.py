"""Models that are divided by layers against whole ones, as engines: the same distributions, caches and sleep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import GroupBroken
from cortex.neuron.engine.memory.plan import ModelSizes
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams, StageSpec, StepOutput
from cortex.neuron.models.registry import open_model
from cortex.neuron.models.sizes import WeightStorage

from ...engine_runs import run, tokens_of
from ...models.reference_models import randomised
from ...rank_threads import RankThreads
from ...tiny_models import tiny_delta, tiny_experts, tiny_sizes

VOCAB = 97
SIZES: dict[str, Any] = {
    **tiny_sizes(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=5,
        num_attention_heads=3,
        num_key_value_heads=1,  # neither divides two devices: stages need no divisibility
    ),
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = tiny_experts(num_experts=5, num_experts_per_tok=3)
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 40}
DELTA: dict[str, Any] = {
    **tiny_delta(linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=12, linear_value_head_dim=10),
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"tie_word_embeddings": True}),
    "windows": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
        },
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        "Glm4MoeLiteConfig",
        {
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "q_lora_rank": 24},
            **{"kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
            "num_key_value_heads": SIZES["num_attention_heads"],
        },
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", EXPERTS | SHARED | DELTA),
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "global_head_dim": 24,
            "sliding_window": 20,
            "num_kv_shared_layers": 1,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "sliding", "full", "full")],
        },
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", EXPERTS | SHARED | DELTA),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **{"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"]},
            **{"mamba_num_heads": 3, "mamba_head_dim": 8, "ssm_state_size": 12, "n_groups": 1, "n_routed_experts": 5},
            **{"moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "head_dim": 16},
        },
    ),
}
DIVISIONS: dict[str, list[tuple[int, ...]]] = {
    "llama": [(3, 2), (2, 1, 2)],
    "qwen3": [(1, 4)],
    "windows": [(2, 1, 2)],
    "qwen3_moe": [(2, 1, 2)],
    "glm4_moe_lite": [(1, 4)],
    "qwen3_next": [(3, 2)],
    "gemma4": [(1, 4), (2, 1, 2)],
    "qwen3_5": [(1, 4)],
    "qwen3_5_moe": [(2, 1, 2)],
    "nemotron_h": [(1, 1, 3)],
}
"""Layers of each stage. In (1, 4), the first stage of hybrid models has no attention; in (2, 1, 2), the second one has
no recurrent layer, or no window."""


def write_family(family: str, folder: Path) -> str:
    model, config, sizes = FAMILIES[family]
    configured = getattr(transformers, config)(**(SIZES | sizes))
    reference = randomised(lambda: getattr(transformers, model)(configured), std=0.12, vector_std=0.3)
    reference.save_pretrained(folder)
    return str(folder)


def whole_spec(path: str) -> LoadSpec:
    return LoadSpec(path, dtype="float32", max_num_seqs=4)


def load_stages(
    path: str, layers: tuple[int, ...], directory: Path, memory_bytes: tuple[int, ...] | None = None
) -> RankThreads:
    directory.mkdir()
    starts = [sum(layers[:rank]) for rank in range(len(layers))]
    limits = memory_bytes or [None] * len(layers)
    stages = tuple(map(StageSpec, starts, layers, limits))
    return RankThreads([replace(whole_spec(path), stages=stages)] * len(layers), directory)


def load_whole(path: str) -> Engine:
    return Engine.load(whole_spec(path), "cpu", lambda *_: None, lambda: False)


def requests() -> list[EngineRequest]:
    """Greedy, seeded and scored ones. The log-probabilities of the whole vocabulary stand for the logits."""
    greedy = SamplingParams(temperature=0.0, top_logprobs=VOCAB)
    seeded = SamplingParams(temperature=1.0, seed=7, top_k=20, top_logprobs=VOCAB)
    prompt = tuple(range(5, 75))
    return [
        EngineRequest("greedy", prompt, max_tokens=12, sampling=greedy),
        EngineRequest("seeded", prompt[:33], max_tokens=9, sampling=seeded),
        EngineRequest("short", (3,), max_tokens=6, sampling=greedy),
        EngineRequest("scored", prompt[3:43], max_tokens=2, sampling=greedy, prompt_logprobs=VOCAB),
    ]


def distributions(outputs: list[StepOutput]) -> torch.Tensor:
    """Log-probabilities at every drawn and every scored position: [positions, vocabulary]"""
    entries = [entry for output in outputs for entry in (*output.prompt_logprobs, *output.logprobs)]
    rows = torch.empty(len(entries), VOCAB)
    for row, entry in zip(rows, entries, strict=True):
        row[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
    return rows


def assert_same(found: dict[str, list[StepOutput]], expected: dict[str, list[StepOutput]]) -> None:
    for name, outputs in expected.items():
        assert tokens_of(found[name]) == tokens_of(outputs), name
        assert (distributions(found[name]) - distributions(outputs)).abs().max() < 1e-4, name


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_compute_the_distributions_of_one_device(family: str, tmp_path: Path) -> None:
    path = write_family(family, tmp_path / "model")
    whole = load_whole(path)
    expected = run(whole, *requests())
    weight_bytes = whole.info.weight_bytes
    _, architecture = open_model(Path(path))
    table_bytes = ModelSizes.of(architecture, WeightStorage(4), whole.info.context_tokens).table_bytes
    whole.close()
    for layers in DIVISIONS[family]:
        group = load_stages(path, layers, tmp_path / f"group {layers}")
        engines = (group.leader, *group.followers.values())
        doubled = sum(engine.info.weight_bytes for engine in engines) - weight_bytes
        assert 0 <= doubled <= (len(engines) - 1) * table_bytes  # every stage has the tables of its own layers
        for _ in range(2):  # the second time from the prefix cache
            outputs = run(group.leader, *requests())
            assert_same(outputs, expected)
        assert outputs["greedy"][0].cached_tokens == (64 if architecture.is_recurrent else 69)
        group.leader.check_integrity()
        group.close()
        assert not group.errors


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with attention and recurrent layers."""
    return write_family("qwen3_5", tmp_path_factory.mktemp("model"))


@pytest.fixture
def group(path: str, tmp_path: Path) -> Iterator[RankThreads]:
    group = load_stages(path, (2, 3), tmp_path / "group")
    yield group
    group.close()


def test_stages_sleep_and_wake(group: RankThreads) -> None:
    before = tokens_of(run(group.leader, requests()[0])["greedy"])
    group.leader.sleep()
    group.follower.sleep()
    group.follower.wake(lambda *_: None)
    group.leader.wake(lambda *_: None)
    assert tokens_of(run(group.leader, requests()[0])["greedy"]) == before


def test_prompts_in_several_chunks_give_the_tokens_of_one_device(path: str, tmp_path: Path) -> None:
    """Steps that draw nothing still end on all stages."""
    whole = load_whole(path)
    request = EngineRequest("long", tuple(range(90)) * 2, max_tokens=5, sampling=SamplingParams(temperature=0.0))
    expected = tokens_of(run(whole, request)["long"])
    whole.close()
    stages = (StageSpec(0, 1), StageSpec(1, 3), StageSpec(4, 1))
    (tmp_path / "group").mkdir()
    spec = replace(whole_spec(path), stages=stages, prefill_chunk_tokens=16)
    group = RankThreads([spec] * 3, tmp_path / "group")
    assert tokens_of(run(group.leader, request)["long"]) == expected
    group.close()


def test_tightest_stage_decides_the_pages_of_all(path: str, tmp_path: Path) -> None:
    """A page of the model takes 8 KiB, of which each stage has one of two attention layers."""
    group = load_stages(path, (3, 2), tmp_path / "group", memory_bytes=(1 << 20, 200 << 10))
    leader, follower = group.leader.info, group.follower.info
    assert leader.num_pages == follower.num_pages
    assert leader.context_tokens == follower.context_tokens
    assert any("another device of the model has less memory" in note for note in leader.notes)
    assert follower.weight_bytes + follower.kv_bytes <= 200 << 10
    group.close()


def test_step_fails_for_good_when_a_stage_is_gone(path: str, tmp_path: Path) -> None:
    group = load_stages(path, (2, 2, 1), tmp_path / "group")
    group.end_followers()
    group.leader.submit(requests()[0])
    with pytest.raises(GroupBroken):
        group.leader.step()
    group.leader.close()
