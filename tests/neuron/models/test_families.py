"""Every family against the reference library, on tiny random checkpoints, in float32 on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import load_model

from ..engine_runs import responses
from .driver import CPU, PROMPT_TOKENS, Driver, assert_parity, continued, load, some_tokens, spec
from .family_models import CASES, reference_of
from .qwen_models import QWEN

QWEN_CASES = [(family, name) for family, entry in QWEN.items() for name in entry.changes]


@pytest.mark.parametrize(("family", "name"), QWEN_CASES + CASES)
@torch.inference_mode()
def test_every_logit_matches_the_reference_library(family: str, name: str, tmp_path: Path) -> None:
    """For a prompt that is computed whole, in chunks that do not fit pages, token by token, and with another one."""
    reference = reference_of(family, name)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens, other = some_tokens(PROMPT_TOKENS), some_tokens(40, seed=1)
    expected = reference(tokens[None]).logits[0]
    (whole,) = Driver(model, 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(whole, expected)
    cut, second = Driver(model, 2).logits([tokens, other], [[31, 1, 2, 30, 1, 1, 1, 8], [1, 38, 1]])
    assert_parity(cut, expected)
    assert_parity(second, reference(other[None]).logits[0])
    assert (whole - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["plain", "odd heads"])
@torch.inference_mode()
def test_logits_token_by_token_equal_the_whole_prompt(name: str, tmp_path: Path) -> None:
    reference = reference_of("qwen3", name)
    reference.save_pretrained(tmp_path)
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[1] * PROMPT_TOKENS])
    assert_parity(logits, reference(tokens[None]).logits[0])


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("family", "name", "dtype"),
    [
        *((family, name, dtype) for family in ("llama", "qwen3") for name in ("plain", "tied") for dtype in HALVES),
        *(("qwen3_moe", name, dtype) for name in ("renormalised", "tied, biased") for dtype in HALVES),
        ("qwen3_next", "plain", torch.float16),
        ("qwen3_next", "tied", torch.bfloat16),
        ("qwen3_5_text", "plain", torch.float16),
        ("qwen3_5_moe", "plain", torch.bfloat16),
    ],
)
@torch.inference_mode()
def test_sharded_files_in_half_precision_match(family: str, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    halved = reference_of(family, name).to(dtype)
    halved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    reference = type(halved).from_pretrained(tmp_path, dtype=torch.float32)
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[40, 35]])
    assert_parity(logits, reference(tokens[None]).logits[0])


@pytest.mark.parametrize(
    ("name", "changes", "absent"),
    [
        ("windows after the first layers", {"rope_theta": 10_000.0, "rope_scaling": None}, "rope_parameters"),
        ("plain", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}, "layer_types"),
    ],
    ids=["older names", "disabled window"],
)
@torch.inference_mode()
def test_published_spelling_of_a_config_means_the_same(
    name: str, changes: dict[str, Any], absent: str, tmp_path: Path
) -> None:
    """Published checkpoints have `rope_theta` and `rope_scaling`, leave out options that the library now writes, and
    have a window size that `use_sliding_window: false` disables."""
    reference = reference_of("qwen3", name)
    reference.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in (absent, "layer_types")}))
    tokens = some_tokens(PROMPT_TOKENS)
    (logits,) = Driver(load(tmp_path), 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(logits, reference(tokens[None]).logits[0])


@torch.inference_mode()
def test_stacked_experts_and_published_spelling_load_the_same(tmp_path: Path) -> None:
    reference = reference_of("qwen3_moe", "renormalised")
    apart, together = tmp_path / "apart", tmp_path / "together"
    reference.save_pretrained(apart)
    reference.save_pretrained(together, save_original_format=False)
    config = json.loads((together / "config.json").read_text())
    config["num_experts"] = config.pop("num_local_experts")
    (together / "config.json").write_text(json.dumps(config))
    tokens = some_tokens(40)
    first, second = (Driver(load(path), 1).logits([tokens], [[40]])[0] for path in (apart, together))
    assert torch.equal(first, second)


def test_a_tower_that_is_left_out_is_noted_and_takes_no_memory(tmp_path: Path) -> None:
    reference_of("qwen3_5", "plain").save_pretrained(tmp_path)
    loaded, without = (
        load_model(spec(tmp_path, vision=vision), CPU, lambda *_: None, lambda: False) for vision in ("device", "off")
    )
    assert loaded.notes == ()
    assert loaded.model.tower is not None
    assert without.notes == ("text only: the vision tower is not loaded",)
    assert without.model.tower is None
    assert without.weight_bytes + loaded.model.tower.parameters.num_bytes == loaded.weight_bytes


GENERATED = [
    ("llama", "plain"),
    ("llama", "llama3 rope"),
    ("qwen3", "windows by turns"),
    ("qwen3", "tied"),
    ("qwen3_moe", "plain"),
    ("qwen3_moe", "many experts"),
    ("qwen3_moe", "dense layers between"),
    ("gemma3_text", "capped"),
    ("gemma4_text", "all of it"),
    ("cohere2", "plain"),
    ("glm4_moe", "plain"),
    ("gpt_oss", "windows"),
    ("glm4_moe_lite", "plain"),
    ("lfm2", "plain"),
    ("granitemoehybrid", "mixture"),
    ("nemotron_h", "mixture"),
]


@pytest.mark.parametrize(("family", "name"), GENERATED)
@torch.inference_mode()
def test_engine_matches_generate_of_the_reference_library(family: str, name: str, tmp_path: Path) -> None:
    """Prompts longer than a chunk, prefilled together with rows that decode, and again from the prefix cache."""
    reference = reference_of(family, name)
    reference.save_pretrained(tmp_path)
    engine = Engine.load(spec(tmp_path, prefill_chunk_tokens=20), CPU, lambda *_: None, lambda: False)
    prompts = [some_tokens(count, seed=count).tolist() for count in (1, 5, 90, 91)]
    expected = [continued(reference, prompt) for prompt in prompts]
    assert responses(engine, prompts) == expected
    assert responses(engine, prompts) == expected
    engine.close()
