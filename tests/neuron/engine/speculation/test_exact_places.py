"""Drafts change no response where a sequence is preempted, has pictures, or is computed by several devices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.request import LoadSpec, StageSpec

from ...models.vision_models import Prompt, random_image, spec_of, text, write_vision_model
from ...rank_threads import RankThreads
from ...tiny_models import tiny_delta, tiny_sizes
from .counting_models import CPU, VOCAB, AnyWidths, counted, counting, responses, save_counting, some_requests

DENSE: dict[str, Any] = {"model_type": "qwen3", **tiny_sizes(vocab_size=VOCAB, hidden_size=32)}
HYBRID: dict[str, Any] = DENSE | {"model_type": "qwen3_5_text", **tiny_delta()}
HYBRID |= {"layer_types": ["linear_attention", "full_attention"]}
OPTIONS: dict[str, Any] = {"dtype": "float32", "context_tokens": 128, "deterministic": True, "max_num_seqs": 4}


@pytest.fixture
def any_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are loaded from files check as many draft tokens as chance says."""
    monkeypatch.setattr(Engine, "_fastest_widths", lambda *_: AnyWidths(random.Random(3)))


def load(path: Path, **changes: Any) -> Engine:
    return Engine.load(LoadSpec(str(path), **(OPTIONS | changes)), CPU, lambda *_: None, lambda: False)


def test_preempted_sequences_continue_as_without_drafts(folder: Path) -> None:
    """Nothing is reserved, so that more sequences start than fit."""
    requests = [replace(each, prompt=counted(each.prompt), max_tokens=40) for each in some_requests(5)[:6]]
    requests = [replace(each, stop_token_ids=(), prediction=expected_after(each.prompt)) for each in requests]
    found = []
    for options in ({"speculation": "off"}, {"speculation": "mtp"}):
        spec = LoadSpec(str(folder), **(OPTIONS | options))
        loaded = build_model(HYBRID, spec, CPU, counting)
        loaded.memory.num_pages = dict.fromkeys(loaded.memory.num_pages, 6)
        engine = Engine(loaded, spec, width_rule=lambda _: AnyWidths(random.Random(5)), reserved_tokens=0)
        found.append(responses(engine, requests))
        stats = engine.stats()
        engine.close()
        assert stats.preemptions > 0
    assert found[0] == found[1]
    assert sum(stats.accepted_tokens.values()) > 20


def expected_after(prompt: Sequence[int]) -> tuple[int, ...]:
    return tuple((prompt[-1] + number) % 256 for number in range(1, 40))


@pytest.mark.usefixtures("any_widths")
def test_responses_to_pictures_are_those_without_drafts(tmp_path: Path) -> None:
    write_vision_model("qwen3_5", tmp_path)
    add_head(tmp_path)
    spec = spec_of(tmp_path)
    prompts = [Prompt.of(spec, [text(5, 60), random_image(33, 50, 60), text(9, 61)]), Prompt.of(spec, [text(12, 62)])]
    requests = [prompt.request(str(number)) for number, prompt in enumerate(prompts)]
    plain = load(tmp_path, speculation="off", context_tokens=512)
    expected = responses(plain, requests)
    plain.close()
    predicted = [replace(each, prediction=expected[each.id][0]) for each in requests]
    engine = load(tmp_path, speculation="mtp", context_tokens=512)
    for each in (predicted, requests):
        assert responses(engine, each) == expected
    stats = engine.stats()
    engine.close()
    assert stats.drafted_tokens["mtp"]
    assert stats.accepted_tokens["prediction"]


def add_head(folder: Path) -> None:
    """A prediction head that is as good as none."""
    tensors = load_file(folder / "model.safetensors")
    layer = next(name for name in tensors if name.endswith("self_attn.q_proj.weight")).removesuffix(
        "self_attn.q_proj.weight"
    )
    head = {name.replace(layer, "mtp.layers.0."): tensor for name, tensor in tensors.items() if name.startswith(layer)}
    hidden = tensors[f"{layer}input_layernorm.weight"].shape[0]
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        head[f"mtp.{name}.weight"] = torch.zeros(hidden)
    head["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(1))
    save_file({name: tensor.clone() for name, tensor in (tensors | head).items()}, folder / "model.safetensors")


@pytest.mark.usefixtures("any_widths")
@pytest.mark.parametrize("division", ["ranks", "stages"])
@pytest.mark.parametrize("kind", ["mtp", "draft"])
def test_divided_models_respond_as_without_drafts(folder: Path, tmp_path: Path, kind: str, division: str) -> None:
    large = save_counting(HYBRID if kind == "mtp" else DENSE, tmp_path / "large", folder, has_head=kind == "mtp")
    changes: dict[str, Any] = {"speculation": kind, "deterministic": False}
    if kind == "draft":
        changes["draft_path"] = str(save_counting(DENSE | {"num_hidden_layers": 1}, tmp_path / "small", folder))
    if division == "stages":
        changes["stages"] = (StageSpec(0, 1), StageSpec(1, 1))
    requests = [replace(each, prompt=counted(each.prompt)) for each in some_requests(4)[:9]]
    requests = [replace(each, sampling=replace(each.sampling, top_logprobs=None)) for each in requests]
    whole = load(large, speculation="off")
    expected = responses(whole, requests)
    whole.close()
    (tmp_path / "group").mkdir()
    group = RankThreads([LoadSpec(str(large), **(OPTIONS | changes))] * 2, tmp_path / "group")
    for _ in range(2):  # the second time from the prefix cache
        assert responses(group.leader, requests) == expected
    stats = group.leader.stats()
    group.close()
    assert not group.errors
    assert 20 < stats.accepted_tokens[kind] < stats.drafted_tokens[kind]
